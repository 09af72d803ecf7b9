"""A training as train_seg.py does it, one step at a time, on minibatches in memory."""

import io
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from rich.console import Console
from torch import nn

import train_seg  # noqa: F401  # declares its command
from datasets import synthetic
from engine import assemble
from engine.checkpoint.run_directory import RunDirectory
from engine.configuration import command_line
from engine.configuration import config as configuration
from engine.process.distributed import World, device_of
from engine.process.memory import keep_freed_memory, peak_memory_mib
from engine.process.stopping import StopRequest
from engine.process.transfers import prefetched
from engine.records.evaluated import Evaluated
from engine.records.metrics_logger import MetricsLogger
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun
from engine.training import loop, setup
from engine.training.profiling import WARM_UP_STEPS, profiled
from engine.training.run import Run
from keepless import recompute_activations
from keepless.saved import kept_bytes
from keepless.torch_internals import compiled_graphs
from scripts.reports.measuring import compiled, peak_bytes


class Switch(NamedTuple):
    overrides: tuple[str, ...]  # of train_seg.py
    only_cuda: bool = False
    freed_memory_kept: bool = True  # on the CPU, by engine.process.memory.keep_freed_memory
    data: str = "in memory"  # where minibatches come from: see Training.endless
    title: str | None = None
    budget: float | None = None  # share of the plain peak that it may take
    compiled_budget: float | None = None  # share of the activations that a compiled step may keep

    @property
    def name(self) -> str:
        return self.title or " ".join(self.overrides)


DEFAULT = "default"
LONG = 100_000  # steps, more than a benchmark takes
PLAIN = Switch((), title=DEFAULT)
COMPILE, STANDARD, BFLOAT16 = "trainer.compile=true", "norm=std", "trainer.precision=bfloat16"
RECOMPUTE = [f"trainer.recompute={choice}" for choice in ("activations", "blocks", "sqrt")]
GROUPS = {
    "switches": (
        PLAIN,
        Switch((BFLOAT16,)),
        Switch(("trainer.precision=float16",)),
        Switch(("trainer.tf32=true",), only_cuda=True),
        Switch(("trainer.channels_last=false",)),
        Switch(("optim.fused=false",)),
        Switch((), only_cuda=True, data="not prefetched", title="without prefetching"),
        Switch(("trainer.ema_decay=0.999",)),
        Switch(("optim.max_gradient_norm=1",)),
        Switch(("trainer.accumulation_steps=2",)),
        Switch(("trainer.accumulation_steps=4",)),
        Switch(("trainer.deterministic=true",)),
        Switch((f"trainer.profile={LONG}",), title="trainer.profile, while it traces"),
    ),
    "data": (
        PLAIN,
        Switch((), data="on the device", title="one minibatch, kept on the device"),
        Switch(("data.workers=2",), data="read"),
    ),
    "norms": (PLAIN, Switch((STANDARD,)), Switch((BFLOAT16,)), Switch((STANDARD, BFLOAT16))),
    "allocation": (PLAIN, Switch((), freed_memory_kept=False, title="freed memory given back")),
    "recompute": (
        PLAIN,
        Switch((STANDARD,)),
        Switch((STANDARD, RECOMPUTE[0])),
        *(Switch((choice,)) for choice in RECOMPUTE),
    ),
    "compile": (
        PLAIN,
        Switch((COMPILE,)),
        Switch((COMPILE, "trainer.accumulation_steps=3")),
        Switch((BFLOAT16,)),
        Switch((BFLOAT16, COMPILE)),
        Switch((STANDARD,)),
        Switch((STANDARD, COMPILE)),
    ),
    "memory": tuple(  # every way to take less, beside standard norms; the compiled ones take minutes to compile
        switch._replace(overrides=(*switch.overrides, *precision), title=" ".join((switch.name, *precision)))
        for precision in ((), (BFLOAT16,))
        for switch in (
            PLAIN,
            Switch((STANDARD,)),
            *(Switch((STANDARD, choice)) for choice in RECOMPUTE[:2]),
            Switch((STANDARD,), budget=0.5, title=f"{STANDARD}, budget 0.5"),
            Switch((STANDARD,), compiled_budget=0.5, title=f"{STANDARD}, compiled, budget 0.5"),
        )
    ),
}


MINIBATCHES = 4  # different ones, repeated
ENDLESS = Schedule(LONG, steps_per_epoch=LONG, evaluate_every=None, checkpoint_every=LONG, log_every=LONG)


class Training:
    """One training, step by step.

    Args:
        common: overrides of train_seg.py that hold for every switch.
        switch: what is different here.
        threads: of PyTorch on the CPU.
        compiler: of the switch that compiles with a budget.
    """

    def __init__(self, common: tuple[str, ...], switch: Switch, threads: int, compiler: str = "inductor"):
        torch.set_num_threads(threads)
        self.config = composed(*common, *switch.overrides)
        trainer = self.config.trainer
        assemble.arithmetic(trainer)
        self.world = World(device=device_of(trainer.device))
        if self.world.device.type == "cpu" and switch.freed_memory_kept:
            keep_freed_memory()
        self.dataset = synthetic(None, "train")
        make = partial(assemble.segmentation_network, self.config, len(self.dataset.classes))
        self.learner = setup.learner(self.config, make, ENDLESS, self.world)
        if switch.compiled_budget:
            network = compiled(self.learner.network, compiler, switch.compiled_budget)
            self.learner.forward = self.learner.forward.through(cast(nn.Module, network))
        elif switch.budget:
            recompute_activations(self.learner.network, budget=switch.budget)
        self.loss = assemble.loss(self.config.loss, self.dataset.ignore_index)
        self.in_memory = list(assemble.training_loader(self.config, self.dataset, MINIBATCHES, self.world))
        self.data = switch.data
        self.minibatches = self.endless()
        if trainer.profile:
            self.folder = tempfile.TemporaryDirectory()
            self.minibatches = profiled(self.minibatches, trainer.profile, Path(self.folder.name))
        self.losses: list[float] = []
        compiled_graphs().clear()  # forget the graph that tried the compiler

    def endless(self) -> Iterator[dict]:
        """Endless minibatches, as the training loop gets them.

        They are read from files ("read"), or kept in memory; or it is always the same one, kept on the device.
        """
        device = self.world.device
        if self.data == "on the device":
            (minibatch,) = prefetched(self.in_memory[:1], device)
            return itertools.repeat(minibatch)
        if self.data == "read":
            return prefetched(assemble.training_loader(self.config, self.dataset, LONG, self.world), device)
        minibatches = itertools.cycle(self.in_memory)
        return minibatches if self.data == "not prefetched" else prefetched(minibatches, device)

    def step(self) -> float:
        """Milliseconds of one more step."""
        started_s = time.perf_counter()
        minibatch = next(self.minibatches)
        loss, _ = loop.train_step(self.learner, self.loss, minibatch, self.config.data.crops_per_minibatch, self.world)
        self.losses.append(loss)
        return self.ms_since(started_s)

    def ms_since(self, started_s: float) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return round(1e3 * (time.perf_counter() - started_s), 3)

    def warm_up(self, steps: int) -> dict:
        """Seconds of the first step, and the number of graphs that torch.compile has made after all of them."""
        first_step_s = round(self.step() / 1e3, 2)
        for _ in range(max(steps, WARM_UP_STEPS if self.config.trainer.profile else 0) - 1):
            self.step()
        return {"first_step_s": first_step_s, "graphs_warm": compiled_graphs()["stats"]["unique_graphs"]}

    def facts(self) -> dict:
        """Everything but times: memory, graphs, and the mean loss of all minibatches after the first step."""
        process_mib = round(peak_memory_mib(torch.device("cpu")), 1)
        counted = compiled_graphs()
        graphs, breaks = counted["stats"]["unique_graphs"], sum(counted["graph_break"].values())
        self.minibatches = self.endless()  # ends a trace: a process has one profiler at a time
        return {
            "saved_bytes": self.saved_bytes(),
            "peak_bytes": peak_bytes(self.step, self.world.device.type, self.learner.network),
            "process_mib": process_mib,
            "graphs": graphs,
            "graph_breaks": breaks,
            "loss": round(statistics.mean(self.losses[1 : 1 + MINIBATCHES]), 5),
        }

    def saved_bytes(self) -> int:
        """Bytes that autograd keeps of the first micro-batch for its backward pass, without parameters."""
        minibatch = next(self.minibatches)
        parts = self.config.trainer.accumulation_steps
        images, labels = (minibatch[key].tensor_split(parts)[0] for key in ("image", "label"))
        self.learner.network.train()
        labels = labels.to(self.world.device)
        return kept_bytes(self.learner.network, lambda: self.loss(self.learner.forward(images), labels))


class Overhead(Training):
    """The same network, optimiser and minibatches in `engine.training.loop.train` and in a bare loop."""

    def __init__(self, common: tuple[str, ...], threads: int, steps: int):
        super().__init__(common, PLAIN, threads)
        self.steps = steps
        self.prepared = [
            (self.learner.forward.normalised(minibatch["image"]), minibatch["label"].to(self.world.device))
            for minibatch in self.in_memory
        ]

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Time both loops after a warm-up round: {"bare": [milliseconds per step in each round], "real": […]}."""
        times: dict[str, list[float]] = {"bare": [], "real": []}
        # Every round writes one record, more often than a run does.
        never, log_every = LONG * self.steps, self.steps
        schedule = Schedule(
            never, steps_per_epoch=never, evaluate_every=None, checkpoint_every=never, log_every=log_every
        )
        terminal = Console(file=io.StringIO(), force_terminal=True)  # the progress bar is drawn but not shown
        with ExitStack() as context:
            folder = context.enter_context(tempfile.TemporaryDirectory())
            directory, data = RunDirectory(folder), self.dataset
            stop = StopRequest(self.config.data.timeout_seconds)
            run = Run(self.config, self.world, stop, directory, data, data, schedule, {}, terminal)
            run.learner = self.learner
            run.metrics = MetricsLogger(Path(folder), terminal, self.config.score, never, start_step=0)
            loop.train(run, self._timed_minibatches(count, times), self.loss, _no_evaluation)
        return {name: values[1:] for name, values in times.items()}

    def _timed_minibatches(self, count: int, times: dict[str, list[float]]) -> Iterator[dict]:
        """The real loop's minibatches. The bare loop runs between its rounds; the two take turns in going first."""
        for number in range(count + 1):
            if number % 2:
                times["bare"].append(self.bare())
            started_s = time.perf_counter()
            yield from itertools.islice(itertools.cycle(self.in_memory), self.steps)
            # The loop asks for a minibatch when a step has ended; on CUDA one step earlier, so there the last step of
            # a round counts in the next round, and every round has as many.
            times["real"].append(self.ms_since(started_s) / self.steps)
            if not number % 2:
                times["bare"].append(self.bare())

    def bare(self) -> float:
        """Milliseconds per step of a minimal loop, on images that are normalised already."""
        started_s = time.perf_counter()
        self.learner.network.train()
        for images, labels in itertools.islice(itertools.cycle(self.prepared), self.steps):
            self.learner.optimizer.zero_grad()
            self.loss(self.learner.forward.network(images), labels).backward()
            self.learner.optimizer.step()
        return self.ms_since(started_s) / self.steps


def _no_evaluation() -> Evaluated:
    return Evaluated(scores={"miou": math.nan}, summary="nothing", images=0)


def composed(*overrides: str) -> SegmentationRun:
    """The checked configuration of `train_seg.py OVERRIDES`."""
    return configuration.typed(command_line.composed("train_seg", *overrides), SegmentationRun)
