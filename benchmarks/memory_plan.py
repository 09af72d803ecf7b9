"""Plan the memory of all experiments of the papers' tables, without a GPU:

    python -m benchmarks.memory_plan table=table3 out=FILE.json
    python -m benchmarks.memory_plan table=all out=FILE.json
    python -m benchmarks.memory_plan table=all only=[hours] out=FILE.json

table is one that experiments name (all: each). For Table 3, the columns fixed crop and fixed batch are filled
too, beside the paper's, on which the deductions from a device's memory are calibrated. The hours of trainings on four
devices or more are those of their operations, at the rate of steps that were measured on an H100. Steps of tables have
the paper's loss, with full-resolution logits (loss.tiles=false). What fits for any other experiment is shown by
scripts.plan_memory.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from omegaconf import MISSING

from benchmarks import frame
from benchmarks.measuring import operations_of
from benchmarks.rows import GIB, Columns, Rows, columns, section
from engine.assemble import schedule_of
from engine.schema.keys import key
from engine.schema.memory import Memory, deductions
from engine.schema.segmentation import CrossEntropyLoss, SegmentationRun
from engine.schema.training import TrainingRun
from engine.training import planner
from keepless.recompute.step.costs import times_of
from scripts.plan_memory import FITS
from scripts.reports import papers

COLUMNS = ("cityscapes_resnext101", "coco_stuff_resnext101", "cityscapes_wrn38", "coco_stuff_wrn38")
ALL = "all"
BUDGET, DEVICES = "12GiB", 4  # the papers' devices, four for Table 3


@dataclass
class PlanArguments(frame.Arguments):
    table: str = key(MISSING, one_of=(ALL, *papers.TABLES))  # as experiments name it; all: each


def items(arguments: PlanArguments) -> dict[str, tuple]:
    """{name of an item: (part of the page, arguments of its measurement)}"""
    tables = [table for table in papers.TABLES if arguments.table in (ALL, table)]
    experiments = [name for table in tables for name in papers.experiments_of(table)]
    measurements: list[tuple] = [("experiments", name) for name in experiments]
    if "table3" in tables:
        measurements += itertools.product(["fits"], COLUMNS, FITS, ("std", "inplace"))
    measurements += [("hours", name) for name in experiments if papers.devices_of(name) >= DEVICES]
    return {"/".join(item): item for item in measurements}


def measure(arguments: PlanArguments, part: str, *words: str) -> Rows:
    with times_of("meta"):  # the same on every machine
        return [{"part": part, **row} for row in PARTS[part](*words)]


def planned(experiment: str) -> Iterator[dict]:
    """Memory of a training step of an experiment, on each of its devices."""
    tiled = papers.configured_as(experiment)
    config = in_full(tiled)
    devices = papers.devices_of(experiment)
    share = planner.crops_per_device(tiled, devices)
    size = tiled.data.crop_size
    trace = planner.step_memory(config, share, size, devices)
    crops = {"crops": config.data.crops_per_minibatch, "share": share, "crop_size": size}
    memory = {"peak": trace.peak, "kept": trace.kept, "place": trace.place}
    by_tiles = None if config is tiled else planner.step_memory(tiled, share, size, devices).peak
    yield {"experiment": experiment, "devices": devices, **crops, **memory, "by_tiles": by_tiles}


def in_full(config: TrainingRun) -> TrainingRun:
    """The configuration with the paper's loss, on logits at label resolution; classifiers are unchanged."""
    if isinstance(config, SegmentationRun):
        assert isinstance(config.loss, CrossEntropyLoss), config.loss
        return replace(config, loss=replace(config.loss, tiles="false"))
    return config


def fit_of(column: str, fit: str, norm: str) -> Iterator[dict]:
    """The planner's choice for Table 3, and the paper's."""
    memory = (f"memory.budget={BUDGET}", f"memory.gpus={DEVICES}", f"memory.fit={fit}")
    config = papers.configured_as(f"table3/{column}_std", f"norm={norm}", *memory)
    fitting = planner.fitting_config(in_full(config), DEVICES).data
    paper = papers.configured_as(experiment_of(column, fit, norm)).data
    yield {
        **{"column": column, "fit": fit, "norm": norm},
        **{"crops": fitting.crops_per_minibatch, "crop_size": fitting.crop_size},
        **{"paper_crops": paper.crops_per_minibatch, "paper_crop_size": paper.crop_size},
    }


def experiment_of(column: str, fit: str, norm: str) -> str:
    """The row of Table 3."""
    return f"table3/{column}_std" if norm == "std" else f"table3/{column}_inplace_{FITS[fit]}"


def work(experiment: str) -> Iterator[dict]:
    """Steps of a training, and floating-point operations of each on one device."""
    config = papers.configured_as(experiment)
    devices = papers.devices_of(experiment)
    share = planner.crops_per_device(config, devices)
    with planner.FakeTensors():
        learner, loss, minibatch, _ = planner.fake_step(config, share, config.data.crop_size)
        operations = operations_of(lambda: loss(learner.forward(minibatch["image"]), minibatch["label"]).backward())
    steps = schedule_of(config, planner.training_images(config.data)).total_steps
    yield {"experiment": experiment, "devices": devices, "steps": steps, "share": share, "operations": operations}


PARTS: dict[str, Callable[..., Iterator[dict]]] = {"experiments": planned, "fits": fit_of, "hours": work}


def heading(arguments: dict) -> tuple[str, str]:
    title = "Every experiment" if arguments["table"] == ALL else papers.TABLES[arguments["table"]]
    return title, f"{DEVICES} devices of {BUDGET}"


def sections(call: dict, _: str) -> Iterator[str]:
    """The page's last section discusses the numbers."""
    by_part = {part: frame.rows_of(call, part) for part in PARTS}
    fits = by_part["fits"]
    if fits:
        standard = {(row["column"], row["fit"]): row for row in fits if row["norm"] == "std"}
        rows_of_fits = ({**row, "standard": standard.get((row["column"], row["fit"]))} for row in fits)
        free = _gib(Memory(budget=BUDGET).available(DEVICES))
        budget_text = f"{BUDGET}, less {deductions(DEVICES)}, leave {free} GiB for tensors."
        yield section("Table 3: what fits", columns(rows_of_fits, FIT, left=3), budget_text)
    experiments = by_part["experiments"]
    if experiments:
        ordered_rows = sorted(experiments, key=lambda row: row["experiment"])
        yield section(f"{len(experiments)} experiments", columns(ordered_rows, EXPERIMENT))
    rows = [*with_hours(by_part["hours"])]
    if rows:
        yield section(f"Hours of {len(rows)} trainings", columns(rows, HOURS))


def with_hours(rows: Rows) -> Iterator[dict]:
    """Hours at the rate of the network's own step on an H100, of ResNeXt-101's if the network was not measured.

    None without the trainings whose steps were measured.
    """
    operations = {row["experiment"]: row["operations"] / row["share"] for row in rows}
    calls = json.loads((frame.RESULTS / "steps.json").read_text())["calls"]
    measured_calls = {call["arguments"]["recipe"]: call for call in calls if call["arguments"]["device"] == "cuda"}
    if measured_calls.keys() - operations.keys():
        return
    rates = {}
    for recipe, call in measured_calls.items():
        (step,) = (row for row in frame.rows_of(call) if row["switch"] == "trainer.capture=true")
        seconds = median(step["times_ms"]) / 1000
        rates[recipe.split("_")[1]] = seconds / (call["arguments"]["crops"] * operations[recipe])
    for row in rows:
        network = next((name for name in rates if name in row["experiment"]), "resnext101")
        hours = row["steps"] * row["operations"] * rates[network] / 3600
        yield {**row, "measured": network, "hours": hours}


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


EXPERIMENT: Columns = [
    ("experiment", "{experiment}"),
    ("devices", "{devices}"),
    ("crops on each", "{share} x {crop_size}²"),
    ("memory", lambda row: _gib(row["peak"])),
    ("saved", lambda row: _gib(row["kept"])),
    ("by tiles", lambda row: row["by_tiles"] and _gib(row["by_tiles"]) or ""),
    ("most in", "{place}"),
]
HOURS: Columns = [
    ("experiment", "{experiment}"),
    ("devices", "{devices}"),
    ("steps", "{steps:,}"),
    ("TFLOP of a step on each", lambda row: f"{row['operations'] / 1e12:.1f}"),
    ("hours", lambda row: f"{row['hours']:.1f}"),
    ("at the rate of", "{measured}"),
]
FIT: Columns = [
    ("", "{column}"),
    ("", lambda row: FITS[row["fit"]].replace("_", " ")),
    ("norm", "{norm}"),
    ("estimated", "{crops} x {crop_size}²"),
    ("/ std", lambda row: _additional_pixels(row, row["standard"])),
    ("published", "{paper_crops} x {paper_crop_size}²"),
    ("/ std", lambda row: _additional_pixels(row, row["standard"], "paper_")),
    ("estimated / published", lambda row: f"{_pixels(row) / _pixels(row, 'paper_') - 1:+.0%}"),
]


def _pixels(row: dict, by: str = "") -> int:
    return row[f"{by}crops"] * row[f"{by}crop_size"] ** 2


def _additional_pixels(row: dict, standard: dict | None, by: str = "") -> str:
    """How many more pixels a minibatch has than with standard norms, if those were estimated too."""
    return f"{_pixels(row, by) / _pixels(standard, by) - 1:+.0%}" if standard else ""


BENCHMARK = frame.Benchmark("memory_plan", PlanArguments, items, measure, heading, sections)
_, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
