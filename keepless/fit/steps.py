"""Steps of a network on fake tensors, in several ways and for several sizes of the example."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..inputs import tensors_in
from ..made_tensors import bytes_of_tensors
from ..recompute.passes.recording import Recording
from ..recompute.step.dry import Loss, counted_step
from ..recompute.step.search import frontier
from ..recompute.step.watch import differentiable
from ..saved import gradient_bytes
from .device import optimizer_bytes
from .sizes import Growth, largest, shape_of
from .step_memory import CountedStep, PlannedStep

logger = logging.getLogger(__name__)
# Names of the ways to run a step
PLAIN = "plain"
RECOMPUTED = "recomputed"
PLANNED = "within a budget"
CHECKPOINTED = "checkpointed"


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Blocks that are usually checkpointed: the outermost modules with submodules whose class occurs more than once.

    `nn.Sequential` counts only if no other class does.
    """
    parents = [module for module in network.modules() if any(module.children()) and module is not network]
    counts = Counter(map(type, parents))
    repeated = {kind for kind, count in counts.items() if count > 1} - {nn.ModuleList, nn.ModuleDict}
    kinds = repeated - {nn.Sequential} or repeated
    blocks = [module for module in parents if type(module) in kinds]
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]


class Way(NamedTuple):
    """A way to run the step on an example. Bytes are of all tensors."""

    name: str
    shape: tuple[int, ...]  # of the example's first tensor
    resident_bytes: int  # throughout the step: weights, optimiser states, the example
    peak: int  # bytes, during this step or the optimiser's
    budget: int  # bytes that the device leaves beside these and gradients
    fits: bool
    time: float  # as a multiple of the baseline step's on this example


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape in readable form, such as 8 x 3 x 224 x 224."""
    return " x ".join(map(str, shape))


class Steps:
    """The steps of a network on fake tensors. A `Growth.value` stands for an example of that size.

    Args:
        available: bytes for tensors.
        time: longest step with a plan, as a multiple of the baseline step.
    """

    def __init__(self, network: nn.Module, growing: Growth, available: int, optimizer: str | float, time: float):
        self.network = network
        self.growing = growing
        self.available = available
        self.time = time
        if not network.training:
            network.train()
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.weights = bytes_of_tensors([*network.parameters(), *network.buffers()])
        self.gradients = sum(map(gradient_bytes, trained))
        value_count = sum(parameter.numel() for parameter in trained)
        self.states, self.temporary = optimizer_bytes(optimizer, value_count, self.gradients)
        self.blocks = repeated_blocks(network)
        self.planned_step = cache(self._planned_step)
        self.peak_and_seconds = cache(self._peak_and_seconds)

    def ways(self) -> list[Way]:
        """Each way with the largest example that fits, or else the smallest that was tried; logs each."""
        ways = []
        names = [PLAIN, RECOMPUTED, PLANNED]
        if self.blocks:
            names.append(CHECKPOINTED)
        value = self.growing.value
        for name in names:
            value = self.largest_value(name, value)
            way = self.way(name, value)
            ways.append(way)
            logger.info("%s: %s %s", name, shape_text(way.shape), "fits" if way.fits else "is too much")
        return ways

    def largest_value(self, name: str, first_value: int) -> int:
        """The value of the largest example that fits in one way; of the smallest that was tried if none fits.

        ValueError: the network does not run on a larger example.
        """
        growing = self.growing
        value = first_value
        while not self.way(name, value).fits and value > growing.step:
            smaller = max(growing.step, value // 2 // growing.step * growing.step)
            try:
                self.planned_step(name, smaller)
            except ValueError:  # e.g. a single value per channel, which cannot be normalised
                return value
            value = smaller

        def peak(value: int) -> int:
            return self.planned_step(name, value).least()

        return largest(peak, self.available, value, growing.step, growing.power, growing.most) or value

    def way(self, name: str, value: int) -> Way:
        step = self.planned_step(name, value)
        peak, time = step.within(self.available)
        needed = step.needed(peak)
        shape = shape_of(self.growing.resized(value))
        fits = needed <= self.available
        return Way(name, shape, step.resident_bytes, needed, step.budget(self.available), fits, time)

    def _planned_step(self, name: str, value: int) -> PlannedStep:
        """A way's step. Within a budget it has all plans that are fast enough, and the baseline and recomputed ones."""
        example = self.growing.resized(value)
        plain = self.peak_and_seconds(PLAIN, value)
        _, plain_seconds = plain
        if name == PLANNED:
            logger.info("%s: trying %s", name, shape_text(shape_of(example)))  # many seconds each
            self.network.zero_grad()
            choices = frontier(counted_step(self.network, *example).as_gradients_come())
            planned = [(choice.peak, plain_seconds + choice.seconds) for choice in choices]
            all_plans = [plain, self.peak_and_seconds(RECOMPUTED, value), *planned]
            plans = [(peak, seconds) for peak, seconds in all_plans if seconds <= self.time * plain_seconds]
        else:
            plans = [self.peak_and_seconds(name, value)]
        resident = {"weights": self.weights, "states": self.states, "example": bytes_of_tensors(tensors_in(example))}
        relative = [(peak, seconds / plain_seconds) for peak, seconds in plans]
        return PlannedStep(resident, self.gradients, self.temporary, relative)

    def _peak_and_seconds(self, name: str, value: int) -> tuple[int, float]:
        """Peak and seconds of a forward and a backward pass before which no parameter has a gradient."""
        self.network.zero_grad()
        example = self.growing.resized(value)
        args, kwargs = example
        contexts: dict[str, AbstractContextManager[Any]] = {
            RECOMPUTED: Recording(inputs=tensors_in(example)),
            CHECKPOINTED: _checkpointing(self.blocks),
        }
        try:
            with CountedStep(timed=True) as step:
                with contexts.get(name, nullcontext()):
                    outputs = differentiable(self.network(*args, **kwargs))
                loss = Loss.apply(*outputs)
                loss.backward(torch.empty_like(loss))
        except Exception as error:  # a network may raise anything
            if value == self.growing.value:
                raise
            raise ValueError(f"the network does not run on {shape_text(shape_of(example))}: {error}") from error
        return step.peak, step.seconds


@contextmanager
def _checkpointing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which blocks are checkpointed."""
    for block in blocks:
        run = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        vars(block)["forward"] = run
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]
