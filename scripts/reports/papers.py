"""The papers' experiments: their published scores, and the training of each row."""

from copy import deepcopy
from functools import cache
from itertools import chain
from typing import NamedTuple

from engine.configuration.choices import choices, file_of
from engine.configuration.command_line import checked, register
from engine.configuration.config import RUNS
from engine.configuration.help import as_text
from engine.schema.evaluation import Evaluation
from engine.schema.keys import CONFIGS, Keys, as_list, declared_in, leaves
from engine.schema.training import TrainingRun
from engine.training.papers import PAPER, command_of, paper_of, settings_of, weights_of
from scripts.reports.runs import with_numbers

REPOSITORY = CONFIGS.parent
SCHEMAS = {run.entry: run for run in RUNS.values()}
register("eval", Evaluation)  # as eval.py does, which need not be imported
for _entry, _schema in SCHEMAS.items():
    register(_entry, _schema)
TABLES = {  # which experiments name in their files
    "table1": "In-Place ABN, Table 1: ImageNet with exchanged activations",
    "table2": "In-Place ABN, Table 2: ImageNet",
    "table3": "In-Place ABN, Table 3: Cityscapes and COCO-Stuff",
    "table4": "In-Place ABN, Table 4: Cityscapes and Vistas",
    "revnet": "RevNet, Tables 3 and 4: CIFAR and ImageNet",
    "memcnn": "MemCNN, Table 1: CIFAR",
    "camvid_table3": "Table 3's protocol on CamVid, two processes",
    "camvid_table3_trained": "Table 3's protocol on CamVid from a pretrained backbone",
    "camvid": "CamVid, not in the papers",
    "cifar10": "CIFAR-10 in few steps, not in the papers",
}
# Keys in which two runs of one training may differ: random numbers, the file to start from, and how the
# minibatch is computed, which `changed_keys` judges.
FREE = ("seed", "init.weights", "init.format", "init.scale", "trainer.accumulation_steps")
# Keys that a run may change when it is resumed, but in which a training must not differ from a row's experiment.
KEPT_ON_RESUMING = ("trainer.patience", "trainer.evaluate_images", "trainer.evaluate_batch_size", "trainer.capture")
# Keys that change a training's speed and rounding but not its recipe: a row may differ in them, and says so.
SPEED = (
    *("trainer.precision", "trainer.channels_last", "trainer.compile", "trainer.tf32", "trainer.capture"),
    *("trainer.deterministic", "trainer.evaluate_batch_size", "optim.fused", "norm.backend"),
)


class Published(NamedTuple):
    """A published score of an experiment."""

    score: str  # in results.json
    evaluation: str  # words of eval.py; empty: the training's own
    percent: float
    source: str  # empty: the table's paper


def experiments_of(table: str) -> list[str]:
    """The experiments of a table, in the order of its rows."""

    def place(name: str) -> tuple:
        row = paper_of(name).get("row")
        return row is None, with_numbers(f"{row}".casefold()), with_numbers(name)

    return sorted((name for name in all_experiments() if table in tables_of(name)), key=place)


def tables_of(experiment: str) -> list[str]:
    """The tables of which an experiment is a row; one of a plugin may name others. ValueError: there is no such."""
    tables = as_list(paper_of(experiment).get("table", []))
    file = file_of("experiment", experiment)
    is_ours = file is None or file.is_relative_to(CONFIGS)
    unknown = {*tables} - TABLES.keys()
    if is_ours and unknown:
        name = f"configs/experiment/{experiment}.yaml: paper: table={unknown.pop()}"
        raise ValueError(f"{name}: expected one of {', '.join(TABLES)}, or none")
    return tables


def titles() -> dict[str, str]:
    """The title of each table, by its name. The tables of plugins come after ours."""
    names = chain(TABLES, *map(tables_of, all_experiments()))
    return {table: TABLES.get(table, table) for table in names}


@cache
def all_experiments() -> dict[str, str]:
    """{experiment: entry that trains it}. If both entries could, its command decides, else train_seg."""
    entries: dict[str, str] = {}
    for entry, schema in SCHEMAS.items():
        for name in choices("experiment", schema):
            if name not in entries or f"{entry}.py" in command_of(name):
                entries[name] = entry
    return entries


def configured_as(experiment: str | None, *overrides: str) -> TrainingRun:
    """The configuration of an experiment, or of the default run."""
    return deepcopy(_composed(experiment, *overrides))


@cache
def _composed(experiment: str | None, *overrides: str) -> TrainingRun:
    entry = all_experiments().get(experiment or "", "train_seg")
    chosen = () if experiment is None else (f"experiment={experiment}",)
    return checked(entry, "run_dir=unused", *chosen, *overrides)


def devices_of(experiment: str) -> int:
    """The devices of the command at an experiment's head."""
    _, _, after = command_of(experiment).partition("--nproc-per-node ")
    return int(after.split()[0]) if after else 1


def published_scores(experiment: str) -> list[Published]:
    """The scores at an experiment's head."""
    paper = paper_of(experiment)
    return [
        Published(name, entry.get("eval", ""), percent, entry.get("source", ""))
        for entry in (paper, *paper.get("also", ()))
        for name, percent in entry.items()
        if name not in PAPER
    ]


def results_of(evaluation: str, config: TrainingRun) -> str:
    """The name, without .json, of the results that eval.py writes with these words for a training that has ended."""
    options = checked("eval", "checkpoint=checkpoints/last.pt", *evaluation.split())
    return options.default_results_file(config).stem


def distinguishing_values(config: TrainingRun) -> dict[str, object]:
    """{key: value} of the keys that have an effect and distinguish one training, or its score, from another."""
    without_effect = {"data.antialias"} if getattr(config.data, "never_shrinks", False) else set()
    values = {}
    for name, value, field in leaves(config):
        must_stay = name in KEPT_ON_RESUMING or not field.metadata.get("free_on_resume")
        if must_stay and name not in FREE and name not in without_effect:
            values[name] = value
    # The results of a run hold what "auto" became there; an experiment, which has not run, counts as without capture.
    if values["trainer.capture"] == "auto":
        values["trainer.capture"] = False
    return values


def changed_keys(config: TrainingRun, experiment: str, processes: int) -> list[str]:
    """key=value of every key, without `SPEED`, in which a run differs from its experiment.

    Processes and micro-batches count if norms see another number of crops than on the devices of its command.
    """
    changed = [f"{name}={value}" for name, value in differing_keys(config, experiment).items() if name not in SPEED]
    started = config.init.weights or getattr(config.body, "weights", None)
    changed += [f"{name}=null" for name in weights_of(experiment) if not started]
    row_crops = crops_per_norm(_composed(experiment), devices_of(experiment))
    if not changed and crops_per_norm(config, processes) != row_crops:
        changed.append(f"processes={processes} trainer.accumulation_steps={config.trainer.accumulation_steps}")
    return changed


def differing_keys(config: TrainingRun, experiment: str) -> dict[str, str]:
    """{key: value as text} in which a run differs from its experiment."""
    row_values = _values_of_row(experiment)
    run_values = distinguishing_values(config).items()
    return {name: as_text(value) for name, value in run_values if name not in row_values or row_values[name] != value}


def crops_per_norm(config: TrainingRun, processes: int) -> int:
    """The most crops that a norm sees at a time."""
    parts = config.trainer.accumulation_steps * (1 if getattr(config.norm, "sync", False) else processes)
    return -(-config.data.crops_per_minibatch // parts)


@cache
def _values_of_row(experiment: str) -> dict[str, object]:
    return distinguishing_values(_composed(experiment))


def first_of(experiment: str) -> str:
    """The first of the experiments that are the same training, in the order of `titles`."""
    order = list(titles())

    def place(name: str) -> tuple[int, str]:
        return min(map(order.index, tables_of(name)), default=len(order)), name

    return min([experiment, *equal_trainings(experiment)], key=place)


def equal_trainings(experiment: str) -> list[str]:
    """Other experiments that are the same training: their files set the same."""
    return [name for name in all_experiments() if name != experiment and _recipe(name) == _recipe(experiment)]


@cache
def _recipe(experiment: str) -> tuple[str, dict[str, object]]:
    """The entry of an experiment, and what its files set that distinguishes its training."""
    entry = all_experiments()[experiment]
    schema: type[Keys] = SCHEMAS[entry]
    free = {name for name, key in declared_in(schema).items() if key.metadata.get("free_on_resume")}
    free = {*FREE, *free} - {*KEPT_ON_RESUMING}
    return entry, {name: value for name, value in settings_of(experiment).items() if name not in free}
