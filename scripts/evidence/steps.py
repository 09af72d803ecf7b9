"""A training as train_seg.py does it, one step at a time, on minibatches in memory."""

import itertools
import statistics
import time
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import nn

import train_seg  # noqa: F401  # declares its command
from datasets import synthetic
from engine import assemble
from engine.configuration import command_line
from engine.configuration import config as configuration
from engine.process.distributed import World, device_of
from engine.process.memory import keep_freed_memory, peak_memory_mib
from engine.process.transfers import prefetched
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun
from engine.training import loop, setup
from keepless import recompute_activations
from keepless.saved import kept_bytes
from scripts.reports.measuring import compiled, peak_bytes


class Switch(NamedTuple):
    overrides: tuple[str, ...]  # of train_seg.py
    only_cuda: bool = False
    freed_memory_kept: bool = True  # on the CPU, by engine.process.memory.keep_freed_memory
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
        Switch(("trainer.ema_decay=0.999",)),
        Switch(("optim.max_gradient_norm=1",)),
        Switch(("trainer.accumulation_steps=2",)),
        Switch(("trainer.accumulation_steps=4",)),
        Switch(("trainer.deterministic=true",)),
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
        self.minibatches = prefetched(itertools.cycle(self.in_memory), self.world.device)  # as the training loop's
        self.losses: list[float] = []

    def step(self) -> float:
        """Milliseconds of one more step."""
        started_s = time.perf_counter()
        minibatch = next(self.minibatches)
        loss, _ = loop.train_step(self.learner, self.loss, minibatch, self.config.data.crops_per_minibatch, self.world)
        self.losses.append(loss)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return round(1e3 * (time.perf_counter() - started_s), 3)

    def warm_up(self, steps: int) -> dict:
        """Seconds of the first step, which compiles."""
        first_step_s = round(self.step() / 1e3, 2)
        for _ in range(steps - 1):
            self.step()
        return {"first_step_s": first_step_s}

    def facts(self) -> dict:
        """Everything but times: memory, and the mean loss of all minibatches after the first step."""
        process_mib = round(peak_memory_mib(torch.device("cpu")), 1)
        return {
            "saved_bytes": self.saved_bytes(),
            "peak_bytes": peak_bytes(self.step, self.world.device.type, self.learner.network),
            "process_mib": process_mib,
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


def composed(*overrides: str) -> SegmentationRun:
    """The checked configuration of `train_seg.py OVERRIDES`."""
    return configuration.typed(command_line.composed("train_seg", *overrides), SegmentationRun)
