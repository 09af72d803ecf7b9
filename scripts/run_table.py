"""Run the trainings of a table that have not been run, one after the other:

    python -m scripts.run_table table=table3 dry_run=true
    python -m scripts.run_table table=table3 "roots={cityscapes: DIR, coco_stuff: DIR}" "weights={resnext101: FILE}"

Lists each training with its command, its arithmetic and the hours that it takes at `tflops`. Without dry_run it then
runs them into RUNS/EXPERIMENT/seedN: the same command continues after a stop, and a training that fails does not keep
the others from running. Rows that are the same training run once. For the page: `python -m scripts.tables runs=[RUNS]`.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from omegaconf import MISSING, DictConfig
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from engine import build
from engine import config as configuration
from engine.command_line import configured
from engine.console import make_console
from engine.schema.keys import key
from engine.schema.training import TrainingRun
from scripts import papers

DRAWN = ("synthetic", "shapes")  # data that needs no folder
BODIES = ("resnext101", "resnext152", "wrn38")  # in names of experiments that start from trained weights


@dataclass
class RunTable:
    table: str = MISSING  # a folder of configs/experiment
    dry_run: bool = False
    runs: str = "runs/tables"  # folder for the run directories
    roots: dict[str, str] = field(default_factory=dict)  # {name of the data: data.root}
    weights: dict[str, str] = field(default_factory=dict)  # {body, as experiments name it: init.weights}
    devices: int | None = key(None, above=0)  # processes of each training; null: as many as in its header
    seeds: list[int] = field(default_factory=lambda: [0])
    overrides: list[str] = field(default_factory=list)  # of every training; scripts.tables lists them as changed
    tflops: float = key(10.0, above=0)  # arithmetic per second of one device in a training, in 10¹² operations


class Job(NamedTuple):
    """A training to run."""

    experiment: str
    seed: int
    command: list[str]
    run_dir: Path
    missing: list[str]  # what the command needs and was not given
    steps: int
    flops: int  # of the whole training

    def hours(self, tflops: float, devices: int) -> float:
        return self.flops / (tflops * 1e12 * devices) / 3600

    @property
    def has_ended(self) -> bool:
        return (self.run_dir / "results.json").is_file()


def run(values: DictConfig) -> int:
    """List the trainings and run those that are missing; returns how many failed.

    Raises:
        ValueError: there is no such table; or, before anything runs, data or weights are missing.
    """
    arguments, console = configuration.typed(values, RunTable), make_console()
    jobs = list(jobs_of(arguments))
    console.print(job_table(jobs, arguments))
    for job in jobs:
        console.print(shlex.join(job.command), soft_wrap=True, markup=False, highlight=False)
    if arguments.dry_run:
        return 0
    waiting = [job for job in jobs if not job.has_ended]
    if missing := sorted({entry for job in waiting for entry in job.missing}):
        raise ValueError(f"table={arguments.table} needs {'; '.join(missing)}")
    failed = []
    for job in waiting:
        console.print(f"[bold]{job.experiment}, seed {job.seed}[/bold]")
        code = subprocess.run(job.command, cwd=papers.REPOSITORY, check=False).returncode
        if code:
            failed.append(job)
            console.print(f"[red]failed with exit code {code}; its log: {job.run_dir / 'log.txt'}[/red]")
    done = len(waiting) - len(failed)
    console.print(f"{done} run, {len(jobs) - len(waiting)} had been run before, {len(failed)} failed")
    for job in failed:
        console.print(f"failed: {job.experiment}, seed {job.seed}")
    return len(failed)


def jobs_of(arguments: RunTable) -> list[Job]:
    """The trainings of a table; rows that are the same training, of this table or another, give one."""
    jobs, seen = [], set()
    for experiment in papers.experiments_of(arguments.table):
        first = min([experiment, *papers.sharing(experiment)])
        if first not in seen:
            seen.add(first)
            jobs += [job_of(first, seed, arguments) for seed in arguments.seeds]
    return jobs


def job_of(experiment: str, seed: int, arguments: RunTable) -> Job:
    """The training of an experiment with one seed."""
    config = papers.configured_as(experiment, *arguments.overrides)
    devices, run_dir = _devices(experiment, arguments), Path(arguments.runs) / experiment / f"seed{seed}"
    entry, missing = papers.all_experiments()[experiment], []
    options = [f"experiment={experiment}", f"seed={seed}", f"run_dir={run_dir.resolve()}", "resume=auto"]
    if config.data.name in arguments.roots:
        options.append(f"data.root={arguments.roots[config.data.name]}")
    elif config.data.name not in DRAWN:
        missing.append(f"roots={{{config.data.name}: DIR}}")
    if "init.weights=FILE" in papers.command_of(experiment):
        body = next(name for name in BODIES if name in experiment)
        if body in arguments.weights:
            options.append(f"init.weights={arguments.weights[body]}")
        else:
            missing.append(f"weights={{{body}: FILE}}")
    start = ["torchrun", "--nproc-per-node", str(devices)] if devices > 1 else [sys.executable]
    steps = build.schedule_of(config, build.training_images(config.data)).total_steps
    flops = steps * config.data.crops_per_minibatch * crop_flops(config)
    command = [*start, f"{entry}.py", *options, *arguments.overrides]
    return Job(experiment, seed, command, run_dir, missing, steps, flops)


def _devices(experiment: str, arguments: RunTable) -> int:
    return arguments.devices or papers.devices_of(experiment)


def crop_flops(config: TrainingRun) -> int:
    """Operations of the forward and backward pass of one crop, counted on fake tensors."""
    crops = 2  # some norms have one value per crop
    with FakeTensorMode():
        learner, loss, minibatch = build.fake_step(config, crops, config.data.crop_size)
        learner.network.train()
        with FlopCounterMode(display=False) as counter:
            loss(learner.forward(minibatch["image"]), minibatch["label"]).backward()
    return counter.get_total_flops() // crops


def job_table(jobs: list[Job], arguments: RunTable) -> Table:
    """What there is to run."""
    table = Table(title=papers.TABLES.get(arguments.table, arguments.table), title_justify="left")
    table.add_column("training", overflow="fold")
    for column in ("devices", "steps", "10¹⁸ operations", f"hours at {arguments.tflops:g} TFLOP/s"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    for job in jobs:
        devices = _devices(job.experiment, arguments)
        state = "has ended" if job.has_ended else "needs " + "; ".join(job.missing) if job.missing else "to run"
        cells = [f"{job.experiment}, seed {job.seed}", str(devices), f"{job.steps:,}", f"{job.flops / 1e18:.2f}"]
        table.add_row(*cells, f"{job.hours(arguments.tflops, devices):.1f}", state)
    return table


@configured("run_table", RunTable)
def main(values: DictConfig) -> None:
    if run(values):
        sys.exit(1)


if __name__ == "__main__":
    main()
