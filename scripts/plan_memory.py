"""Plan the memory of a training without a GPU, for any experiment and override:

    python -m scripts.plan_memory experiment=table3/cityscapes_resnext101_std memory.gpus=4
    python -m scripts.plan_memory experiment=… memory.gpus=4 memory.budget=12GiB memory.fit=batch   # or crop
    python -m scripts.plan_memory experiment=… memory.budget=12GiB memory.fit=crop trainer.recompute=budget
    python -m scripts.plan_memory body=resnet101 data.crop_size=512 norm=std memory.gpus=1
    python -m scripts.plan_memory table=table3 out=FILE.json                                       # see below

Prints the tensors on one device at the peak of a step, the module of the peak, and the bytes that the backward pass
needs.
memory.fit also finds, for standard, checkpointed and in-place norms, the largest minibatch within memory.budget: the
most crops of data.crop_size (batch; the paper's FIXED CROP) or the largest data.crops_per_minibatch crops (crop; its
FIXED BATCH). With trainer.recompute=budget, a step computes as many activations again as the budget requires, and
memory.fit allows it memory.time, relative to a step that keeps them all (estimated).
memory.gpus=1 also lists how much memory one device needs for the whole minibatch with bfloat16, in-place norms,
recomputed blocks, plans within memory.time and a reversible body. The keys are train_seg.py's, or train_imagenet.py's
for one of its experiments. Traces run on fake tensors.

table=… plans all experiments of a folder of configs/experiment (all: of each) into a record and its page.
"""

import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

from omegaconf import DictConfig
from rich.table import Table

from datasets.registry import FOR_CLASSIFICATION
from engine.configuration import config as configuration
from engine.configuration.choices import no_such_choice
from engine.configuration.command_line import configured
from engine.process.console import make_console, table_of
from engine.process.stopping import errors_for_users
from engine.schema.memory import deductions, device_memory
from engine.schema.training import TrainingRun
from engine.training import planner
from keepless.norms.backends.activations import INVERTIBLE_ACTIVATIONS
from keepless.saved import size_text
from scripts import plan_table
from scripts.reports import papers

PLANNED_NORMS = ("std", "checkpoint", "inplace")
FITS = {  # memory.fit: its meaning, and the paper's name for it
    "batch": "more crops of the same size (the paper's FIXED CROP)",
    "crop": "larger crops, as many (the paper's FIXED BATCH)",
}


class Fit(NamedTuple):
    """The largest minibatch that fits with a norm."""

    norm: str
    crops: int  # per minibatch
    share: int  # on each device
    crop_size: int
    crop: str  # height x width
    bytes: int  # on each device


def plan(values: DictConfig, schema: type[TrainingRun]) -> list[Fit]:
    """Print the plan; return the minibatches that fit. ValueError: a key is wrong, or the step exceeds the budget."""
    config, console = configuration.typed(values, schema), make_console()
    devices = config.memory.gpus or 1
    config.check_shares(devices)
    share, size, crop = planner.share_of(config, devices), config.data.crop_size, planner.crop_text(config.data)
    budget, found, step = config.memory.available(devices), [], config
    if budget is not None and config.trainer.recompute == "budget":
        memory, _, about = planner.within_budget(config, devices)
        step = replace(config, memory=memory)
        console.print(f"trainer.recompute=budget: {about}.")
    trace = planner.step_memory(step, share, size, devices)
    fails = budget is not None and trace.peak > budget
    if budget is not None:
        verdict = f"This step {'does not fit' if fails else 'fits'} into memory.budget={config.memory.budget}"
        console.print(f"{verdict}: less {deductions(devices)}, {size_text(budget)} are left for tensors.")
    each = "on one device" if devices == 1 else f"on each of {devices} devices"
    console.print(f"{share} crops of {crop} pixels {each}: {size_text(trace.peak)}, most in: {trace.place}")
    at_peak = ([kind, size_text(size)] for kind, size in trace.at_peak.items() if size)
    console.print(table_of(["at the peak", "memory"], at_peak))
    console.print(f"kept for the backward pass: {size_text(trace.kept)}")
    if config.memory.fit is not None:
        found = list(fits(config, devices))
        console.print(f"memory.fit={config.memory.fit}, {FITS[config.memory.fit]}, {each}:")
        console.print(fit_table(found))
    if config.memory.gpus == 1:
        console.print(f"{share} crops of {crop} pixels on one device, with the memory that CUDA itself needs:")
        console.print(combination_table(config))
    if config.trainer.precision != "float32":
        console.print(f"{config.trainer.precision}: operators are cast as on CPUs; CUDA's list differs a little.")
    if config.trainer.compile:
        console.print("trainer.compile=true is planned as without it: compiled graphs keep about as much.")
    if fails and not found:
        raise ValueError(
            f"memory.budget={config.memory.budget}: this step needs {size_text(trace.peak)}; memory.fit=batch or "
            f"memory.fit=crop finds what fits"
        )
    return found


def fits(config: TrainingRun, devices: int) -> Iterator[Fit]:
    """The largest minibatch with each norm that can have the configured activation."""
    for norm in PLANNED_NORMS:
        if norm == "inplace" and config.norm.activation not in INVERTIBLE_ACTIVATIONS:
            continue
        changed = replace(deepcopy(config), norm=plan_table.as_norm(norm, config.norm))
        chosen = planner.fitting(changed, devices)
        share, size = planner.share_of(chosen, devices), chosen.data.crop_size
        peak = planner.needed(chosen, share, size, devices)
        yield Fit(norm, chosen.data.crops_per_minibatch, share, size, planner.crop_text(chosen.data), peak)


def fit_table(found: list[Fit]) -> Table:
    """The minibatches that fit, and their pixels relative to the first norm's."""
    table = table_of(["norm", "crops per minibatch", "on each device", "crop", "memory", "pixels"])
    first = found[0].crops * found[0].crop_size ** 2
    for fit in found:
        more = fit.crops * fit.crop_size**2 / first - 1
        table.add_row(fit.norm, str(fit.crops), str(fit.share), fit.crop, size_text(fit.bytes), f"{more:+.0%}")
    return table


def combination_table(config: TrainingRun) -> Table:
    """Memory of one device for the whole minibatch, by combination."""
    crops, size = config.data.crops_per_minibatch, config.data.crop_size
    needed = {name: planner.needed(changed, crops, size) for name, changed in plan_table.combinations(config).items()}
    rows = ([name, size_text(device_memory(peak))] for name, peak in needed.items())
    return table_of(["combination", "memory"], rows)


def entry_of(arguments: list[str]) -> str:
    """The entry whose keys the arguments are: train_seg, unless the experiment or the data is train_imagenet's.

    ValueError: there is no such experiment.
    """
    if any(argument.startswith("table=") for argument in arguments):
        return plan_table.BENCHMARK.name
    known = papers.all_experiments()
    chosen = re.search(r"^\+?experiment=([\w/.-]+)$", "\n".join(arguments), re.MULTILINE)
    if chosen is None:
        return "train_imagenet" if {f"data={name}" for name in FOR_CLASSIFICATION} & {*arguments} else "train_seg"
    if chosen[1] not in known:
        raise no_such_choice("experiment", chosen[1], known)
    return known[chosen[1]]


def main() -> None:
    with errors_for_users():
        entry = entry_of(sys.argv[1:])
    if entry == plan_table.BENCHMARK.name:
        plan_table.main()
        return
    schema = papers.SCHEMAS[entry]

    def run(values: DictConfig) -> None:
        plan(values, schema)

    configured(entry, schema, about=__doc__)(run)()


if __name__ == "__main__":
    main()
