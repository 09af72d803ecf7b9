"""Plan the memory of all experiments of the papers' tables, without a GPU:

    python -m scripts.evidence.memory_plan table=table3 out=FILE.json
    python -m scripts.evidence.memory_plan table=all out=FILE.json
    python -m scripts.evidence.memory_plan table=revnet only=[claims] out=FILE.json

table names a folder of configs/experiment (all: each). For Table 3, the columns fixed crop and fixed batch are filled
too, beside the paper's, on which the deductions from a device's memory are calibrated, and a minibatch on one device;
for Table 2, what does not fit with standard norms (section 4.1); for RevNet, its claims. Steps of tables have the
paper's loss, with full-resolution logits (loss.tiles=false).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from omegaconf import MISSING

from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from engine.schema.memory import Memory, deductions, device_memory
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.training import planner
from keepless.recompute.step.costs import times_of
from scripts.plan_memory import FITS
from scripts.reports import frame, papers
from scripts.reports.markdown import GIB, Columns, Rows, columns, section, table

COLUMNS = ("cityscapes_resnext101", "coco_stuff_resnext101", "cityscapes_wrn38", "coco_stuff_wrn38")
ALL, BUDGET, DEVICES = "all", "12GiB", 4  # the papers' devices, four for Table 3
NORMS = {"standard norms": "norm=std", "in-place norms": "norm=inplace"}
ON_ONE_DEVICE = "table3/cityscapes_resnext101_std"  # the row whose whole minibatch README plans on one device
COMBINATIONS = {  # overrides, and trainer.recompute
    **{title: (norm, "none") for title, norm in NORMS.items()},
    **{f"{title}, trainer.recompute=sqrt": (norm, "sqrt") for title, norm in NORMS.items()},
}
# Networks that do not fit with standard norms, by section 4.1 of the paper.
LIMITS = {"ResNeXt-152": "table2/resnext152_inplace_256", "WideResNet-38": "table2/wrn38_inplace_256"}
# The claims of RevNet's section 7.2. A unit has six layers: 2 + 6 * 100 are 602.
CLAIMS = {
    "ResNet-101": ("revnet/imagenet_resnet101", "trainer.accumulation_steps=1"),
    "RevNet-104": ("revnet/imagenet_revnet104",),
    "RevNet-602": ("revnet/imagenet_revnet104", "body.structure=[2,2,94,2]"),
}


@dataclass
class PlanArguments(frame.Arguments):
    table: str = key(MISSING, one_of=(ALL, *papers.TABLES))  # a folder of configs/experiment; all: each


def items(arguments: PlanArguments) -> dict[str, tuple]:
    """{name of an item: (part of the page, arguments of its measurement)}"""
    own = [name for name in papers.all_experiments() if f"{arguments.table}/" in ("all/", name[: name.index("/") + 1])]
    chosen: list[tuple] = [("experiments", name) for name in own]
    if arguments.table in (ALL, "table3"):
        chosen += [("fits", column, fit, norm) for column in COLUMNS for fit in FITS for norm in ("std", "inplace")]
    chosen += [("one_device", name) for name in own if name == ON_ONE_DEVICE]
    chosen += [("limits", network) for network in LIMITS if arguments.table in (ALL, "table2")]
    chosen += [("claims", network) for network in CLAIMS if arguments.table in (ALL, "revnet")]
    return {"/".join(item): item for item in chosen}


def measure(arguments: PlanArguments, part: str, *what: str) -> Rows:
    with times_of("meta"):  # the same on every machine
        return [{"part": part, **row} for row in PARTS[part](*what)]


def planned(experiment: str) -> Iterator[dict]:
    """Memory of a training step of an experiment, on each of its devices."""
    tiled, devices = papers.configured_as(experiment), papers.devices_of(experiment)
    config, share, size = in_full(tiled), planner.share_of(tiled, devices), tiled.data.crop_size
    trace = planner.step_memory(config, share, size, devices)
    crops = {"crops": config.data.crops_per_minibatch, "share": share, "crop_size": size}
    memory = {"peak": trace.peak, "kept": trace.kept, "place": trace.place}
    by_tiles = None if config is tiled else planner.step_memory(tiled, share, size, devices).peak
    yield {"experiment": experiment, "devices": devices, **crops, **memory, "by_tiles": by_tiles}


def in_full(config: TrainingRun) -> TrainingRun:
    """The configuration with the paper's loss, on logits at label resolution; classifiers are unchanged."""
    if isinstance(config, SegmentationRun):
        return replace(config, loss=replace(config.loss, tiles="false"))
    return config


def fit_of(column: str, fit: str, norm: str) -> Iterator[dict]:
    """The planner's choice for Table 3, and the paper's."""
    memory = (f"memory.budget={BUDGET}", f"memory.gpus={DEVICES}", f"memory.fit={fit}")
    config = papers.configured_as(f"table3/{column}_std", f"norm={norm}", *memory)
    chosen = planner.fitting(in_full(config), DEVICES).data
    paper = papers.configured_as(experiment_of(column, fit, norm)).data
    yield {
        **{"column": column, "fit": fit, "norm": norm},
        **{"crops": chosen.crops_per_minibatch, "crop_size": chosen.crop_size},
        **{"paper_crops": paper.crops_per_minibatch, "paper_crop_size": paper.crop_size},
    }


def experiment_of(column: str, fit: str, norm: str) -> str:
    """The row of Table 3."""
    return f"table3/{column}_std" if norm == "std" else f"table3/{column}_inplace_{FITS[fit]}"


def on_one_device(name: str) -> Iterator[dict]:
    """An experiment's whole minibatch on one device, with each combination of norm, recomputation and precision."""
    data = papers.configured_as(name).data
    crops, size = data.crops_per_minibatch, data.crop_size
    about = {"network": "cityscapes_resnext101", "crops": crops, "crop_size": size}
    for combination, (norm, recompute) in COMBINATIONS.items():
        config = papers.configured_as(name, norm)
        for precision in ("float32", "bfloat16"):
            trainer = replace(config.trainer, recompute=recompute, precision=precision)
            needed = planner.needed(replace(config, trainer=trainer), crops, size)
            yield {**about, "combination": f"{combination}, {precision}", "device": device_memory(needed)}


def limit_of(network: str) -> Iterator[dict]:
    """Bytes of a step with standard norms on each device, and what a device has left for tensors."""
    config = papers.configured_as(LIMITS[network], "norm=std", f"memory.budget={BUDGET}")
    share, size = planner.share_of(config, DEVICES), config.data.crop_size
    peak, left = planner.step_memory(config, share, size, DEVICES).peak, config.memory.available(DEVICES)
    yield {"network": network, "share": share, "crop_size": size, "peak": peak, "left": left}


def claim_of(network: str) -> Iterator[dict]:
    config = papers.configured_as(*CLAIMS[network], f"memory.budget={BUDGET}", "memory.fit=batch")
    assert isinstance(config, ClassificationRun)
    yield {"network": network, "images": planner.fitting(config, devices=1).data.crops_per_minibatch}


PARTS: dict[str, Callable[..., Iterator[dict]]] = {
    "experiments": planned,
    "fits": fit_of,
    "one_device": on_one_device,
    "limits": limit_of,
    "claims": claim_of,
}
TITLES = {
    "cityscapes_resnext101": "Cityscapes, ResNeXt-101",
    "coco_stuff_resnext101": "COCO-Stuff, ResNeXt-101",
    "cityscapes_wrn38": "Cityscapes, WideResNet-38",
    "coco_stuff_wrn38": "COCO-Stuff, WideResNet-38",
    "cityscapes_resnext152": "Cityscapes, ResNeXt-152",
    "vistas_wrn38": "Vistas, WideResNet-38",
}
PUBLISHED_CLAIMS = {"ResNet-101": "32", "RevNet-104": "128 (64 used in training)", "RevNet-602": "“trains”"}


def about(arguments: dict) -> tuple[str, str]:
    title = "Every experiment" if arguments["table"] == ALL else papers.TABLES[arguments["table"]]
    return title, f"{DEVICES} devices of {BUDGET}"


def sections(call: dict, _: str) -> Iterator[str]:
    """The page's last section discusses the numbers."""
    experiments, fits = (frame.rows_of(call, part) for part in ("experiments", "fits"))
    if fits:
        standard = {(row["column"], row["fit"]): row for row in fits if row["norm"] == "std"}
        free = _gib(Memory(budget=BUDGET).available(DEVICES) or 0)
        left = f"{BUDGET}, less {deductions(DEVICES)}, leave {free} GiB for tensors."
        shown = ({**row, "standard": standard.get((row["column"], row["fit"]))} for row in fits)
        yield section("Table 3: what fits", columns(shown, FIT, left=3), left)
    if rows := frame.rows_of(call, "one_device"):
        yield section("A minibatch of Tables 3 and 4 on one device", _one_device(rows))
    if rows := frame.rows_of(call, "limits"):
        yield section("Table 2's networks with standard norms", columns(rows, LIMIT))
    if rows := frame.rows_of(call, "claims"):
        yield section("RevNet's claims", columns(rows, CLAIM))
    if experiments:
        ordered = sorted(experiments, key=lambda row: row["experiment"])
        yield section(f"{len(experiments)} experiments", columns(ordered, EXPERIMENT))


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


LIMIT: Columns = [
    ("", "{network}"),
    ("images on each", "{share} x {crop_size}²"),
    ("memory", lambda row: _gib(row["peak"])),
    ("left for tensors", lambda row: _gib(row["left"])),
]
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
    ("difference", lambda row: f"{_pixels(row, '') / _pixels(row, 'paper_') - 1:+.0%}"),
]


def _more(row: dict, by: str) -> str:
    """How many more pixels a minibatch has than with standard norms, if that was measured too."""
    if row["norm"] == "std" or row["standard"] is None:
        return ""
    return f"{_pixels(row, by) / _pixels(row['standard'], by) - 1:+.0%}"


def _pixels(row: dict, by: str) -> int:
    return row[f"{by}crops"] * row[f"{by}crop_size"] ** 2


def _one_device(rows: list[dict]) -> str:
    networks: dict[tuple, dict[str, list[str]]] = {}
    for row in rows:
        combination, _, precision = row["combination"].rpartition(", ")
        cells = networks.setdefault((TITLES[row["network"]], f"{row['crops']} x {row['crop_size']}²"), {})
        cells.setdefault(combination, []).append(f"{row['device'] / GIB:.1f}")
    titles = ["", "crops", *next(iter(networks.values()))]
    return table(titles, ([*network, *map(" / ".join, cells.values())] for network, cells in networks.items()), 2)


BENCHMARK = frame.Benchmark("memory_plan", PlanArguments, items, measure, about, sections)
_, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
