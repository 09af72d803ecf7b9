"""Steps of a network on fake tensors, in several ways and for several sizes of the example."""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..inputs import tensors_in
from ..made_tensors import bytes_of_tensors
from ..recompute.recipes import ByPlan
from ..recompute.recording import Recording
from ..recompute.rehearsal import counted_step
from ..recompute.search import Choice, frontier
from .counted import Counted, counted, repeated_blocks
from .device import optimizer_bytes
from .sizes import Growth, largest, shape_of

logger = logging.getLogger(__name__)
PLAIN, RECOMPUTED, PLANNED, CHECKPOINTED = "plain", "recomputed", "within a budget", "checkpointed"


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


class _Plans(NamedTuple):
    """The plans of a step within the time limit, and a function that counts the step with one of them."""

    run: Callable[[Choice], Counted]
    choices: list[Choice]  # by decreasing peak


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
        self.way, self.count = cache(self._way), cache(self._count)
        self.plans, self.least = cache(self._plans), cache(self._least)

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
                return self.held(value) + max(self.least(value).peak, self.temporary)
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

    def _count(self, name: str, value: int) -> Counted:
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

    def _run(self, value: int, context: AbstractContextManager[object] | None = None) -> Counted:
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

    def _planned(self, value: int) -> Counted:
        """The step with the fastest plan that fits, or with none if faster; if none fits, with the lowest peak."""
        limit, without = self.available - self.held(value), self._without_plan(value)
        if without[0].peak <= limit:
            return without[0]
        run, choices = self.plans(value)
        first = bisect_left(choices, True, key=lambda choice: run(choice).peak <= limit)
        counts = [*without, *map(run, choices[first : first + 1])]
        return min(
            (count for count in counts if count.peak <= limit), key=attrgetter("seconds"), default=self.least(value)
        )

    def _without_plan(self, value: int) -> list[Counted]:
        """The plain step, and the recomputed one if it is within the time limit."""
        plain, recomputed = self.count(PLAIN, value), self.count(RECOMPUTED, value)
        return [plain, recomputed] if recomputed.seconds <= self.time * plain.seconds else [plain]

    def _least(self, value: int) -> Counted:
        """The step with the lowest peak within the time limit."""
        run, choices = self.plans(value)
        return min([*self._without_plan(value), *map(run, choices[-1:])], key=attrgetter("peak"))

    def _plans(self, value: int) -> _Plans:
        plain, example = self.count(PLAIN, value), self.growing.resized(value)
        step = counted_step(self.network, *example)
        longest = self.time * plain.seconds

        @cache
        def run(choice: Choice) -> Counted:
            return self._run(value, Recording(ByPlan([choice.plan(step)]), inputs=tensors_in(example)))

        choices = frontier(step)  # by increasing time, as estimated
        late = bisect_left(choices, True, key=lambda choice: longest < math.inf and run(choice).seconds > longest)
        return _Plans(run, choices[:late])
