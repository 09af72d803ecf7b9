"""Run the trainings of a table that have not been run, one after the other:

    python -m scripts.run_table table=table3 dry_run=true
    python -m scripts.run_table table=table3 "roots={cityscapes: DIR, coco_stuff: DIR}" "weights={resnext101: FILE}"
    python -m scripts.run_table table=table3 "seeds=[0,1,2]" overrides=[trainer.precision=bfloat16] dry_run=true

Lists each training with its command, and with the evaluations that the table needs of it besides its own. Without
dry_run it then runs the trainings in RUNS/EXPERIMENT/seedN: the same command continues after a stop, and if a training
fails, the others still run. Rows that are the same training run once. Evaluate when they have ended; for the page:
`python -m benchmarks.tables runs=[RUNS] out=OUT`. `weights` are our checkpoints, run directories or the authors'
files.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING
from rich.table import Table

from engine import assemble
from engine.assemble.contracts import imported
from engine.checkpoint import files as checkpoint
from engine.configuration.command_line import configured
from engine.configuration.texts import as_typed
from engine.process import plugins
from engine.process.console import make_console, table_of
from engine.process.jobs import ENDED_BEFORE, has_ended, print_summary, run_job
from engine.schema.additions import Plugins
from engine.schema.data import Data, SegmentationData
from engine.schema.keys import CHOICES, key, override
from engine.training import planner
from models.checkpoints.released_files import released_file
from scripts.reports import papers

DATA = sorted(name for name, kind in CHOICES["data"].items() if not imported("data", kind).drawn)  # in folders


class Tables(tuple[str, ...]):
    """The names of all tables, read when they are needed: plugins are loaded after this file, and may add some."""

    def __iter__(self) -> Iterator[str]:
        return iter(papers.titles())

    def __contains__(self, name: object) -> bool:
        return name in papers.titles()


@dataclass
class RunTable(Plugins):
    table: str = key(MISSING, one_of=Tables(papers.TABLES))  # its name, as at the head of its experiments
    dry_run: bool = False  # only list the commands
    runs: str = "runs/tables"  # folder for the run directories
    roots: Any = None  # {name of the data: data.root}
    weights: Any = None  # {part of experiments' names, such as resnext101: file or run directory}; the longest wins
    # Processes of each training; null: as many as in its command. With fewer, trainer.accumulation_steps is added if
    # norms then see as many crops at a time as in the row.
    devices: int | None = key(None, above=0)
    seeds: list[int] = field(default_factory=lambda: [0])  # each training runs once with every seed
    overrides: list[str] = field(default_factory=list)  # of every training; benchmarks.tables prints them

    def check(self) -> None:
        for name in ("roots", "weights"):
            paths = getattr(self, name)
            if not isinstance(paths, (dict, type(None))):
                raise ValueError(f"{name}={paths}: expected {{NAME: PATH, …}}")
        for name in self.roots or {}:
            if name not in DATA:
                raise ValueError(f"roots={{{name}: …}}: expected one of {', '.join(DATA)}")
        for name, path in (self.weights or {}).items():
            if not any(name in experiment for experiment in papers.all_experiments()):
                raise ValueError(f"weights={{{name}: …}}: no experiment has this in its name")
            if not Path(path).exists():
                raise ValueError(f"weights={{{name}: {path}}}: there is no such file or run directory")
        refused = [word for word in self.overrides if word.partition("=")[0] in ("seed", "run_dir", "resume")]
        if refused:
            words = ",".join(refused)
            raise ValueError(f"overrides=[{words}]: a table sets these itself; give seeds=[…] or runs=FOLDER")


class Training(NamedTuple):
    """A training to run."""

    title: str  # the experiment and the seed
    command: list[str]
    evaluations: list[list[str]]  # commands for the published scores that it does not evaluate itself
    missing: list[str]  # options without which the command names DIR or FILE, and is not run
    has_ended: bool
    devices: int
    steps: int
    changed: list[str]  # each key=value that keeps this from being a run of the row


def run(arguments: RunTable) -> int:
    """List the trainings of a table, run the missing ones, and return how many failed.

    Raises:
        ValueError: there is no such table; no training has its data and weights; the given data or weights are unfit.
        Preempted: a training was asked to stop.
    """
    console = make_console()
    check_files(arguments)
    trainings = list(trainings_of(arguments))
    console.print(training_table(trainings, papers.titles()[arguments.table]))
    for training in trainings:
        for command in (training.command, *training.evaluations):
            console.print(shlex.join(command), soft_wrap=True)
    if arguments.dry_run:
        return 0
    waiting = [training for training in trainings if not training.has_ended]
    ready = [training for training in waiting if not training.missing]
    missing = sorted({option for training in waiting for option in training.missing})
    if waiting and not ready:
        raise ValueError(f"table={arguments.table} needs {'; '.join(missing)}")
    results: list[str | None] = [ENDED_BEFORE] * (len(trainings) - len(waiting))
    for number, training in enumerate(ready, start=1):
        place = f"job {number} of {len(ready)}"
        results.append(run_job(place, training.title, training.command, console, papers.REPOSITORY))
    failures = print_summary(results, console)
    if missing:
        console.print(f"{len(waiting) - len(ready)} not run, which need {'; '.join(missing)}")
    return len(failures)


def trainings_of(arguments: RunTable) -> list[Training]:
    """The trainings of a table; rows that are the same training, of this table or another, are listed once."""
    firsts = dict.fromkeys(map(papers.first_of, papers.experiments_of(arguments.table)))
    return [training_of(first, seed, arguments) for first in firsts for seed in arguments.seeds]


def training_of(experiment: str, seed: int, arguments: RunTable) -> Training:
    """The training of an experiment with one seed."""
    devices = arguments.devices or papers.devices_of(experiment)
    accumulation = accumulation_of(experiment, devices, arguments.overrides)
    config = papers.configured_as(experiment, *accumulation, *arguments.overrides)
    if papers.weights_of(experiment):
        config.init.weights = config.init.weights or "FILE"  # which one counts for no row
    run_dir = Path(arguments.runs) / experiment / f"seed{seed}"
    options = [f"experiment={experiment}", f"seed={seed}", override("run_dir", run_dir.resolve()), "resume=auto"]
    inputs, missing = inputs_of(experiment, config.data.name, arguments)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(devices)] if devices > 1 else []
    entry = f"{papers.all_experiments()[experiment]}.py"
    unquoted = (entry, *plugins.words(), *options, *inputs, *accumulation, *arguments.overrides)
    words = [as_typed(word, type(config)) for word in unquoted]
    rows = [row for name in (experiment, *papers.equal_trainings(experiment)) for row in papers.published_scores(name)]
    evaluate = [sys.executable, "eval.py", *plugins.words(), override("checkpoint", run_dir.resolve())]
    return Training(
        title=f"{experiment}, seed {seed}",
        command=[sys.executable, *start, *words],
        evaluations=[[*evaluate, *row.split()] for row in dict.fromkeys(row.evaluation for row in rows) if row],
        missing=missing,
        has_ended=has_ended(run_dir, words, devices),
        devices=devices,
        steps=assemble.schedule_of(config, planner.training_images(config.data)).total_steps,
        changed=papers.changed_keys(config, experiment, devices),
    )


def inputs_of(experiment: str, data: str, arguments: RunTable) -> tuple[list[str], list[str]]:
    """The overrides for data and weights, and the options of this command that are missing for them."""
    overrides = []
    missing = []
    roots = arguments.roots or {}
    overridden = {word.partition("=")[0] for word in arguments.overrides}
    if data in roots:
        overrides.append(override("data.root", roots[data]))
    elif data in DATA and "data.root" not in overridden:
        overrides.append("data.root=DIR")
        missing.append(f"roots={{{data}: DIR}}")
    parts = [part for part in arguments.weights or {} if part in experiment]
    for name in papers.weights_of(experiment):
        if parts:
            file = Path(arguments.weights[sorted(parts, key=len)[-1]])
            overrides.append(override(name, file))
            if name == "init.weights" and file.is_file() and released_file(file):
                overrides.append("init.format=released")
        elif name not in overridden:
            overrides.append(f"{name}=FILE")
            missing.append(f"weights={{{shared_part(experiment, arguments.table)}: FILE}}")
    return overrides, missing


def shared_part(experiment: str, table: str) -> str:
    """A part of the names of all experiments of a table that start from the same weights, and of no others."""
    rows = [name for name in papers.experiments_of(table) if papers.weights_of(name)]
    config = papers.configured_as(experiment)
    same_body = {name for name in rows if papers.configured_as(name).body == config.body}
    folder, _, network = experiment.rpartition("/")
    network = network.removeprefix(f"{config.data.name}_")
    candidates = (network.partition("_")[0], folder)
    parts = (part for part in candidates if {name for name in rows if part in name} == same_body)
    return next(parts, network)


def check_files(arguments: RunTable) -> None:
    """ValueError: the data or a file of weights that is given cannot be read, or images are missing."""
    for name, path in (arguments.weights or {}).items():
        file = checkpoint.file_of(path)
        if not released_file(file):
            with plugins.errors_named(f"weights={{{name}: {path}}}"):
                checkpoint.read(file)
    by_data = {papers.configured_as(name).data.name: name for name in papers.experiments_of(arguments.table)}
    for name, root in (arguments.roots or {}).items():
        if name in by_data:
            config = papers.configured_as(by_data[name], override("data.root", root), *arguments.overrides)
            check_images(config.data, f"roots={{{name}: {root}}}")


def check_images(data: Data, argument: str) -> None:
    """ValueError, beginning with `argument`, if images are missing, or the data cannot be read."""
    find: Any = assemble.labelled_splits if isinstance(data, SegmentationData) else assemble.classified_splits
    shortfalls = assemble.shortfalls(data, *find(data))
    if shortfalls and not data.incomplete:
        cure = "get the rest, or give overrides=[data.incomplete=true]"
        raise ValueError(f"{argument}: {'; '.join(shortfalls)}: {cure}")


def accumulation_of(experiment: str, devices: int, overrides: list[str]) -> list[str]:
    """The override of micro-batches with which an experiment's norms see as many crops on fewer devices."""
    config = papers.configured_as(experiment, *overrides)
    usual_devices = papers.devices_of(experiment)
    is_overridden = any(word.startswith("trainer.accumulation_steps=") for word in overrides)
    has_more = papers.crops_per_norm(config, devices) > papers.crops_per_norm(config, usual_devices)
    if is_overridden or not has_more or usual_devices % devices:
        return []
    return [f"trainer.accumulation_steps={config.trainer.accumulation_steps * usual_devices // devices}"]


def training_table(trainings: list[Training], title: str) -> Table:
    table = table_of(["training", "devices", "steps", "evaluations"], title=title)
    table.columns[0].overflow = "fold"
    table.add_column("", overflow="fold")
    for training in trainings:
        if training.has_ended:
            state = "has ended"
        elif training.missing:
            state = "needs " + "; ".join(training.missing)
        else:
            state = "to run"
        if training.changed:
            state += "; no run of the row: " + " ".join(training.changed)
        evaluations = str(1 + len(training.evaluations))
        table.add_row(training.title, str(training.devices), f"{training.steps:,}", evaluations, state)
    return table


@configured("run_table", RunTable)
def main(arguments: RunTable) -> None:
    if run(arguments):
        sys.exit(1)


if __name__ == "__main__":
    main()
