"""Steps of a network on fake tensors, in several ways and for several sizes of the example."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..inputs import tensors_in
from ..made_tensors import MadeTensors, bytes_of_tensors
from ..recompute.recorder.recording import Recording
from ..recompute.step.costs import seconds_for, work_of
from ..recompute.step.recurrent import temporaries_of, with_workspace
from ..recompute.step.rehearsal import Loss, counted_step, differentiable
from ..recompute.step.search import frontier
from ..torch_internals import OpOverload
from .device import optimizer_bytes
from .sizes import Growth, largest, shape_of

logger = logging.getLogger(__name__)
PLAIN, RECOMPUTED, PLANNED, CHECKPOINTED = "plain", "recomputed", "within a budget", "checkpointed"


class Count(NamedTuple):
    """A forward and a backward pass."""

    peak: int  # the most bytes at any moment
    seconds: float  # estimated


class _Timed(MadeTensors):
    """Also adds up the seconds of operators."""

    seconds = 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        moved, operations = work_of(function, args, kwargs or {}, result)
        self.peak = max(self.peak, self.bytes + temporaries_of(function, args, kwargs or {}))
        if moved:
            self.seconds += seconds_for(moved, operations, tensors_in(result)[0])
        return result

    def call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return with_workspace(function, args, kwargs, function(*args, **kwargs))


def counted(forward: Callable[[], object]) -> Count:
    """Count a forward and a backward pass. ValueError: no output needs a gradient."""
    with _Timed() as made:
        outputs = differentiable(forward())
        loss = Loss.apply(*outputs)
        loss.backward(torch.empty_like(loss))
    return Count(made.peak, made.seconds)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Blocks that are usually checkpointed: the outermost modules with submodules whose class occurs more than once.

    `nn.Sequential` counts only if no other class does.
    """
    inside = [one for one in network.modules() if any(one.children()) and one is not network]
    number = Counter(map(type, inside))
    repeated = {kind for kind in number if number[kind] > 1} - {nn.ModuleList, nn.ModuleDict}
    blocks = [one for one in inside if type(one) in (repeated - {nn.Sequential} or repeated)]
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]


class Way(NamedTuple):
    """A way to run the step on an example. Bytes count all tensors."""

    name: str
    shape: tuple[int, ...]  # of the example's first tensor
    held: int  # bytes before and after the step: weights, gradients, optimiser states, the example
    peak: int  # bytes, during this step or the optimiser's
    fits: bool
    time: float  # as a multiple of the plain step's on this example


def size_of(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


class Steps:
    """The steps of a network on fake tensors. A `Growth.value` stands for an example of that size.

    Args:
        available: bytes for tensors.
        time: longest step with a plan, as a multiple of the plain step.
    """

    def __init__(self, network: nn.Module, growing: Growth, available: int, optimizer: str | float, time: float):
        self.network, self.growing, self.available, self.time = network, growing, available, time
        if not network.training:
            network.train()
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.weights = bytes_of_tensors([*network.parameters(), *network.buffers()])
        self.gradients = bytes_of_tensors(trained)
        values = sum(parameter.numel() for parameter in trained)
        self.states, self.temporary = optimizer_bytes(optimizer, values, self.gradients)
        self.blocks = repeated_blocks(network)
        self.way, self.count, self.choices = cache(self._way), cache(self._count), cache(self._choices)

    def ways(self) -> list[Way]:
        """Each way with the largest example that fits, or else the smallest that was tried; logs each."""
        found, value = [], self.growing.value
        for name in (PLAIN, RECOMPUTED, PLANNED, *([CHECKPOINTED] if self.blocks else [])):
            value = self.largest(name, value)
            found.append(self.way(name, value))
            logger.info("%s: %s %s", name, size_of(found[-1].shape), "fits" if found[-1].fits else "is too much")
        return found

    def largest(self, name: str, begin: int) -> int:
        """The largest example that fits in one way, starting at `begin`; the smallest that was tried if none fits.

        ValueError: the network does not run on a larger example.
        """
        growing, value = self.growing, begin
        while not self.way(name, value).fits and value > growing.step:
            smaller = max(growing.step, value // 2 // growing.step * growing.step)
            try:
                self.way(name, smaller)
            except ValueError:  # e.g. a single value per channel, which cannot be normalised
                return value
            value = smaller

        def peak(value: int) -> int:
            if name == PLANNED:  # the fastest plan uses all that is available, so look at the lowest peak
                logger.info("%s: trying %s", name, size_of(self.shape(value)))  # many seconds each
                return self.held(value) + max(min(self.choices(value)).peak, self.temporary)
            return self.way(name, value).peak

        return largest(peak, self.available, value, *growing[1:3], most=growing.most) or value

    def _way(self, name: str, value: int) -> Way:
        plain, count, held = self.count(PLAIN, value), self.count(name, value), self.held(value)
        peak = held + max(count.peak, self.temporary)
        return Way(name, self.shape(value), held, peak, peak <= self.available, count.seconds / plain.seconds)

    def shape(self, value: int) -> tuple[int, ...]:
        return shape_of(self.growing.resized(value))

    def held(self, value: int) -> int:
        example = bytes_of_tensors(tensors_in(self.growing.resized(value)))
        return self.weights + self.gradients + self.states + example

    def _count(self, name: str, value: int) -> Count:
        if name == PLANNED:
            return self._planned(value)
        if name == RECOMPUTED:
            return self._run(value, Recording(inputs=tensors_in(self.growing.resized(value))))
        if name == PLAIN:
            return self._run(value)
        for block in self.blocks:
            run = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            vars(block)["forward"] = run
        try:
            return self._run(value)
        finally:
            for block in self.blocks:
                del vars(block)["forward"]

    def _run(self, value: int, context: AbstractContextManager[object] | None = None) -> Count:
        args, kwargs = self.growing.resized(value)

        def forward() -> object:
            with context or nullcontext():
                return self.network(*args, **kwargs)

        try:
            return counted(forward)
        except Exception as error:  # a network may raise anything
            if value == self.growing.value:
                raise
            raise ValueError(f"the network does not run on {size_of(self.shape(value))}: {error}") from error

    def _planned(self, value: int) -> Count:
        """The fastest step that fits, with a plan or without; if none fits, the one with the lowest peak."""
        limit, plain = self.available - self.held(value), self.count(PLAIN, value)
        if plain.peak <= limit:
            return plain
        choices = self.choices(value)
        fitting = [choice for choice in choices if choice.peak <= limit]
        return min(fitting, key=attrgetter("seconds")) if fitting else min(choices)

    def _choices(self, value: int) -> list[Count]:
        """The plain step; and the recomputed one, and those with a plan, if they are within the time limit."""
        plain, step = self.count(PLAIN, value), counted_step(self.network, *self.growing.resized(value))
        planned = [Count(choice.peak, plain.seconds + choice.seconds) for choice in frontier(step)]
        counts = [self.count(RECOMPUTED, value), *planned]
        return [plain, *(count for count in counts if count.seconds <= self.time * plain.seconds)]
