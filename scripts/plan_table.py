"""Plan the memory of the papers' experiments without a GPU: `scripts.plan_memory table=…`:

    python -m scripts.plan_memory table=all out=FILE.json
    python -m scripts.plan_memory table=table3 out=FILE.json
    python -m scripts.plan_memory table=all only=[claims] out=FILE.json

Plans the memory of a table's experiments on each device. Of Table 3 also the columns fixed crop (memory.fit=batch) and
fixed batch (memory.fit=crop) as the planner fills them, beside the paper's, on which the deductions from a device's
memory are calibrated; of Tables 3 and 4 the memory with which each minibatch fits on one device; of RevNet its claims.
What is compared with the paper has the paper's loss, with logits of full resolution (loss.tiles=false).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace

from omegaconf import MISSING

from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from engine.schema.memory import Memory, deductions, device_memory
from engine.schema.network import NORMS, Norm
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.training import planner
from keepless.norms.backends.activations import INVERTIBLE_ACTIVATIONS
from scripts.reports import frame, papers
from scripts.reports.markdown import GIB, Columns, Rows, columns, section, table

COLUMNS = ("cityscapes_resnext101", "coco_stuff_resnext101", "cityscapes_wrn38", "coco_stuff_wrn38")
ALL = "all"
SMALL_NETWORK = 80_000_000  # bytes of parameters
# The claims of RevNet's section 7.2. A unit has six layers: 2 + 6 * 100 are 602.
CLAIMS = {
    "ResNet-101": ("revnet/imagenet_resnet101", "trainer.accumulation_steps=1"),
    "RevNet-104": ("revnet/imagenet_revnet104",),
    "RevNet-602": ("revnet/imagenet_revnet104", "body.structure=[2,2,94,2]"),
}


@dataclass
class PlanArguments(frame.Arguments):
    table: str = MISSING  # a folder of configs/experiment; all: each
    budget: str = "12GiB"  # of each of the papers' devices
    devices: int = key(4, above=0)  # of Table 3

    def check(self) -> None:
        if self.table not in (known := (ALL, *papers.TABLES)):
            raise ValueError(f"table={self.table}: expected one of {', '.join(known)}")
        Memory(budget=self.budget, gpus=self.devices).check()


def items(arguments: PlanArguments) -> dict[str, tuple]:
    """{PART/…: (part, what of it)}"""
    own = [name for name in papers.all_experiments() if f"{arguments.table}/" in ("all/", name[: name.index("/") + 1])]
    chosen: list[tuple] = [("experiments", name) for name in own]
    if arguments.table in (ALL, "table3"):
        chosen += [("fits", column, fit, norm) for column in COLUMNS for fit in FITS for norm in ("std", "inplace")]
    whole: dict[tuple, str] = {}  # each minibatch of Tables 3 and 4, by its first experiment
    for name in own:
        if found := re.match(r"table[34]/(\w+?_(resnext\d+|wrn\d+))_", name):
            data = papers.configured_as(name).data
            whole.setdefault((found[1], data.crops_per_minibatch, data.crop_size), name)
    chosen += [("one_device", name, network) for (network, *_), name in whole.items()]
    chosen += [("claims", network) for network in CLAIMS if arguments.table in (ALL, "revnet")]
    return {"/".join(item): item for item in chosen}


def measure(arguments: PlanArguments, part: str, *what: str) -> Rows:
    memory = (f"memory.budget={arguments.budget}", f"memory.gpus={arguments.devices}")
    planners: dict[str, Callable[..., Iterable[dict]]] = {
        "experiments": lambda name: [planned(name)],
        "fits": lambda column, fit, norm: [fit_of(column, fit, norm, memory)],
        "one_device": on_one_device,
        "claims": lambda network: [claim_of(network, memory[0])],
    }
    return [{"part": part, **row} for row in planners[part](*what)]


def planned(experiment: str) -> dict:
    """Memory of a training step of an experiment, on each of its devices."""
    tiled, devices = papers.configured_as(experiment), papers.devices_of(experiment)
    config, share, size = in_full(tiled), planner.share_of(tiled, devices), tiled.data.crop_size
    trace = planner.step_memory(config, share, size, devices)
    crops = {"crops": config.data.crops_per_minibatch, "share": share, "crop_size": size}
    memory = {"peak": trace.peak, "kept": trace.kept, "place": trace.place}
    by_tiles = None if config is tiled else planner.step_memory(tiled, share, size, devices).peak
    return {"experiment": experiment, "devices": devices, **crops, **memory, "by_tiles": by_tiles}


def in_full(config: TrainingRun) -> TrainingRun:
    """The configuration with the paper's loss, on logits of the labels' resolution; classifiers are unchanged."""
    if not isinstance(config, SegmentationRun):
        return config
    changed = deepcopy(config)
    changed.loss.tiles = "false"
    return changed


def fit_of(column: str, fit: str, norm: str, memory: tuple[str, ...]) -> dict:
    """The planner's choice for Table 3, and the paper's."""
    config = papers.configured_as(f"table3/{column}_std", f"norm={norm}", *memory, f"memory.fit={fit}")
    chosen = planner.fitting(in_full(config), config.memory.gpus or 1).data
    paper = papers.configured_as(experiment_of(column, fit, norm)).data
    return {
        **{"column": column, "fit": fit, "norm": norm},
        **{"crops": chosen.crops_per_minibatch, "crop_size": chosen.crop_size},
        **{"paper_crops": paper.crops_per_minibatch, "paper_crop_size": paper.crop_size},
    }


def experiment_of(column: str, fit: str, norm: str) -> str:
    """The row of Table 3."""
    return f"table3/{column}_std" if norm == "std" else f"table3/{column}_inplace_{FITS[fit]}"


def on_one_device(name: str, network: str) -> Iterator[dict]:
    """The minibatch of an experiment as a whole on one device."""
    config = papers.configured_as(name)
    crops, size = config.data.crops_per_minibatch, config.data.crop_size
    for combination, changed in combinations(config).items():
        needed = device_memory(planner.needed(changed, crops, size))
        yield {"network": network, "crops": crops, "crop_size": size, "combination": combination, "device": needed}


def claim_of(network: str, budget: str) -> dict:
    config = papers.configured_as(*CLAIMS[network], budget, "memory.fit=batch")
    assert isinstance(config, ClassificationRun)
    return {"network": network, "images": planner.fitting(config, devices=1).data.crops_per_minibatch}


def as_norm(name: str, norm: Norm) -> Norm:
    """A norm of another name with the same options, as far as it has them."""
    options = {entry.name: getattr(norm, entry.name) for entry in fields(norm) if entry.name != "name"}
    known = {entry.name for entry in fields(NORMS[name])}
    return NORMS[name](**{option: value for option, value in options.items() if option in known})


def combinations(config: TrainingRun) -> dict[str, TrainingRun]:
    """The configuration with each combination of norm, recomputation, precision and reversible body.

    Small networks get no reversible body: RevNet-104 would need more than they do.
    """
    changes = [("std", "none", config.body, "standard norms"), ("inplace", "none", config.body, "in-place norms")]
    if not config.body.is_reversible():
        changes += [
            (norm, recompute, config.body, f"{about}, trainer.recompute={recompute}")
            for recompute in ("sqrt", "budget")
            for norm, _, _, about in changes[:2]
        ]
        data = config.data
        if planner.step_memory(config, data.crops_per_minibatch, data.crop_size).parameters > SMALL_NETWORK:
            reversible = papers.configured_as(None, "body=revnet104").body
            reversible = replace(reversible, output_stride=config.body.output_stride)
            changes.append(("inplace", "none", reversible, "in-place norms, body=revnet104"))
    found = {}
    for norm, recompute, body, about in changes:
        if norm == "inplace" and config.norm.activation not in INVERTIBLE_ACTIVATIONS:
            continue
        for precision in ("float32", "bfloat16"):
            trainer = replace(config.trainer, recompute=recompute, precision=precision)
            changed = replace(deepcopy(config), norm=as_norm(norm, config.norm), body=body, trainer=trainer)
            found[f"{about}, {precision}"] = changed
    return found


TITLES = {
    "cityscapes_resnext101": "Cityscapes, ResNeXt-101",
    "coco_stuff_resnext101": "COCO-Stuff, ResNeXt-101",
    "cityscapes_wrn38": "Cityscapes, WideResNet-38",
    "coco_stuff_wrn38": "COCO-Stuff, WideResNet-38",
    "cityscapes_resnext152": "Cityscapes, ResNeXt-152",
    "vistas_wrn38": "Vistas, WideResNet-38",
}
FITS = {"batch": "fixed_crop", "crop": "fixed_batch"}  # memory.fit -> the row of Table 3
PUBLISHED_CLAIMS = {"ResNet-101": "32", "RevNet-104": "128 (64 used in training)", "RevNet-602": "“trains”"}


def about(arguments: dict) -> tuple[str, str]:
    title = "Every experiment" if arguments["table"] == ALL else papers.TABLES[arguments["table"]]
    return title, f"{arguments['devices']} devices of {arguments['budget']}"


def rows_of(call: dict, part: str) -> Rows:
    return [row for row in frame.rows_of(call) if row["part"] == part]


def sections(call: dict, _: str) -> Iterator[str]:
    """What they say of the numbers stands at the end of the page."""
    experiments, fits = rows_of(call, "experiments"), rows_of(call, "fits")
    if fits:
        standard = {(row["column"], row["fit"]): row for row in fits if row["norm"] == "std"}
        shown = ({**row, "standard": standard[row["column"], row["fit"]]} for row in fits)
        yield section("Table 3: what fits", columns(shown, FIT, left=3), _left(call["arguments"]))
    if rows := rows_of(call, "one_device"):
        yield section("A minibatch of Tables 3 and 4 on one device", _one_device(rows))
    if rows := rows_of(call, "claims"):
        yield section("RevNet's claims", columns(rows, CLAIM))
    ordered = sorted(experiments, key=lambda row: row["experiment"])
    yield section(f"{len(experiments)} experiments", columns(ordered, EXPERIMENT))


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


CLAIM: Columns = [
    ("", "{network}"),
    ("images", "{images}"),
    ("published", lambda row: PUBLISHED_CLAIMS[row["network"]]),
]
EXPERIMENT: Columns = [
    ("experiment", "{experiment}"),
    ("devices", "{devices}"),
    ("crops on each", "{share} x {crop_size}²"),
    ("memory", lambda row: _gib(row["peak"])),
    ("kept", lambda row: _gib(row["kept"])),
    ("by tiles", lambda row: row["by_tiles"] and _gib(row["by_tiles"]) or ""),
    ("most in", "{place}"),
]
FIT: Columns = [
    ("", lambda row: TITLES[row["column"]]),
    ("", lambda row: FITS[row["fit"]].replace("_", " ")),
    ("norm", "{norm}"),
    ("planned", "{crops} x {crop_size}²"),
    ("", lambda row: _more(row, "")),
    ("published", "{paper_crops} x {paper_crop_size}²"),
    ("", lambda row: _more(row, "paper_")),
    ("difference", lambda row: f"{row['crops'] * row['crop_size'] ** 2 / _pixels_of_paper(row) - 1:+.0%}"),
]


def _more(row: dict, by: str) -> str:
    """How many more pixels a minibatch has than with standard norms."""
    ours, standard = (found[f"{by}crops"] * found[f"{by}crop_size"] ** 2 for found in (row, row["standard"]))
    return "" if row["norm"] == "std" else f"{ours / standard - 1:+.0%}"


def _pixels_of_paper(row: dict) -> int:
    return row["paper_crops"] * row["paper_crop_size"] ** 2


def _left(arguments: dict) -> str:
    budget, devices = arguments["budget"], arguments["devices"]
    left = Memory(budget=budget).available(devices) or 0
    return f"{budget}, less {deductions(devices)}, leave {_gib(left)} GiB for tensors."


def _one_device(rows: list[dict]) -> str:
    networks: dict[tuple, dict[str, list[str]]] = {}
    for row in rows:
        combination, _, precision = row["combination"].rpartition(", ")
        cells = networks.setdefault((TITLES[row["network"]], f"{row['crops']} x {row['crop_size']}²"), {})
        cells.setdefault(combination, []).append(f"{row['device'] / GIB:.1f}")
    titles = ["", "crops", *next(iter(networks.values()))]
    return table(titles, ([*network, *map(" / ".join, cells.values())] for network, cells in networks.items()), 2)


BENCHMARK = frame.Benchmark(
    "memory_plan", PlanArguments, items, measure, sections, about, program="scripts.plan_memory"
)
run, main = frame.command(BENCHMARK, __doc__)
