"""Plan the memory of a training without a GPU, for any experiment and override:

    python -m scripts.plan_memory experiment=table3/cityscapes_resnext101_std memory.gpus=4
    python -m scripts.plan_memory experiment=… memory.gpus=4 memory.budget=12GiB memory.fit=batch   # or crop
    python -m scripts.plan_memory experiment=… memory.budget=12GiB memory.fit=crop trainer.recompute=budget
    python -m scripts.plan_memory body=resnet101 data.crop_size=512 norm=std

Prints the tensors on one device at the peak of a step, the pass of the peak, and the bytes saved for backward.
memory.fit also finds, for standard, checkpointed and in-place norms, the largest minibatch within memory.budget: the
most crops of data.crop_size (batch; the paper's FIXED CROP) or the largest data.crops_per_minibatch crops (crop; its
FIXED BATCH). With trainer.recompute=budget, a step recomputes as many activations as the budget requires, and
memory.fit allows a step memory.time times the estimated time of one that keeps them all.
The keys are train_seg.py's, or train_imagenet.py's for one of its experiments. Traces run on fake tensors.
"""

import re
import sys
from copy import deepcopy
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from engine.configuration.command_line import configured
from engine.configuration.messages import no_such
from engine.process.console import make_console, table_of
from engine.schema.classification import ClassificationRun
from engine.schema.keys import CHOICES, complete_and_check, groups_of
from engine.schema.memory import deductions
from engine.schema.training import TrainingRun
from engine.training import planner
from keepless.units import size_text
from scripts.reports import papers

FITS = {"batch": "fixed_crop", "crop": "fixed_batch"}  # memory.fit -> the row of Table 3


def plan(config: TrainingRun) -> dict[str, TrainingRun]:
    """Print the plan; return what fits, by norm. ValueError: a key is wrong, or the step exceeds the budget."""
    console = make_console()
    devices = config.memory.gpus or 1
    config.check_shares(devices)
    share = planner.crops_per_device(config, devices)
    budget = None if config.memory.budget is None else config.memory.available(devices)
    step = config
    if budget is not None and config.trainer.recompute == "budget":
        memory, _, remark = planner.memory_within_budget(config, devices)
        step = replace(config, memory=memory)
        console.print(f"trainer.recompute=budget: {remark}.")
    trace = planner.step_memory(step, share, config.data.crop_size, devices)
    exceeds_budget = budget is not None and trace.peak > budget
    if budget is not None:
        verdict = f"This step {'does not fit' if exceeds_budget else 'fits'} into memory.budget={config.memory.budget}"
        console.print(f"{verdict}: less {deductions(devices)}, {size_text(budget)} are left for tensors.")
    crops = f"{share} crops of {planner.crop_text(config.data)} pixels"
    console.print(f"{crops} {place_of(config, devices)}: {size_text(trace.peak)}, most in: {trace.place}")
    at_peak = ([kind, size_text(size)] for kind, size in trace.at_peak.items() if size)
    console.print(table_of(["at the peak", "memory"], at_peak))
    console.print(f"saved for backward: {size_text(trace.kept)}")
    fitting = {} if config.memory.fit is None else print_fits(config, devices, console)
    if config.trainer.precision != "float32":
        console.print(f"{config.trainer.precision}: operators are cast as on CPUs; CUDA's list differs a little.")
    if config.trainer.compile:
        console.print("trainer.compile=true is estimated as without it: compiled graphs save about as much.")
    if exceeds_budget and not fitting:
        raise ValueError(
            f"memory.budget={config.memory.budget}: this step needs {size_text(trace.peak)}; memory.fit=batch or "
            f"memory.fit=crop finds what fits"
        )
    return fitting


def place_of(config: TrainingRun, devices: int) -> str:
    """Where a step's crops are: "on each of 4 devices, in 2 micro-batches"."""
    place = "on one device" if devices == 1 else f"on each of {devices} devices"
    parts = config.trainer.accumulation_steps
    return f"{place}, in {parts} micro-batches" if parts > 1 else place


def print_fits(config: TrainingRun, devices: int, console: Console) -> dict[str, TrainingRun]:
    """Print the largest minibatches that fit, by norm; return them. ValueError: see `fitting_configs`."""
    assert config.memory.fit is not None
    fitting = fitting_configs(config, devices, console)
    paper = FITS[config.memory.fit].replace("_", " ")
    limit = max(planner.limit_of_images(config_of_norm, devices) for config_of_norm in fitting.values())
    console.print(f"memory.fit={config.memory.fit} (the paper's {paper}), {place_of(config, devices)}{limit}:")
    console.print(fit_table(fitting, devices))
    return fitting


def fitting_configs(config: TrainingRun, devices: int, console: Console) -> dict[str, TrainingRun]:
    """{norm: the configuration with the largest minibatch that fits}; prints why other norms have none."""
    fitting = {}
    for norm in ("std", "checkpoint", "inplace"):
        candidate = replace(deepcopy(config), norm=config.norm.as_kind(CHOICES["norm"][norm]))
        try:
            complete_and_check(candidate)
            fitting[norm] = planner.fitting_config(candidate, devices)
        except ValueError as reason:
            console.print(f"norm={norm}: {reason}", soft_wrap=True)
    if not fitting:
        raise ValueError(f"memory.budget={config.memory.budget}: no norm of these has a minibatch that fits")
    return fitting


def fit_table(fitting: dict[str, TrainingRun], devices: int) -> Table:
    """The minibatches that fit, and their pixels relative to the first norm's."""
    table = table_of(["norm", "crops per minibatch", "on each device", "crop", "memory", "pixels"])
    pixels = [config.data.crops_per_minibatch * config.data.crop_size**2 for config in fitting.values()]
    for (norm, config), pixel_count in zip(fitting.items(), pixels, strict=True):
        data = config.data
        share = planner.crops_per_device(config, devices)
        memory = size_text(planner.needed_bytes(config, share, data.crop_size, devices))
        crops = (str(data.crops_per_minibatch), str(share), planner.crop_text(data))
        table.add_row(norm, *crops, memory, f"{pixel_count / pixels[0] - 1:+.0%}")
    return table


def entry_of(arguments: list[str]) -> str:
    """The entry whose keys the arguments are: train_seg, unless the experiment or the data is train_imagenet's.

    ValueError: there is no such experiment.
    """
    experiments = papers.all_experiments()
    match = re.search(r"^\+?experiment=([\w/.-]+)$", "\n".join(arguments), re.MULTILINE)
    if match is None:
        classified = {f"data={name}" for name in groups_of(ClassificationRun)["data"]}
        return "train_imagenet" if classified & {*arguments} else "train_seg"
    if match[1] not in experiments:
        raise ValueError(f"experiment={match[1]}: {no_such('experiment', match[1], experiments)}")
    return experiments[match[1]]


def main() -> None:
    try:
        entry = entry_of(sys.argv[1:])
    except ValueError as error:  # `errors_for_users` is for a command's end
        sys.exit(f"error: {error}")
    configured(entry, papers.SCHEMAS[entry], description=__doc__)(plan)()


if __name__ == "__main__":
    main()
