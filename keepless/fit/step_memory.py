"""The memory of a training step, counted on fake tensors: no device, no arithmetic."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import tensors_in
from ..made_tensors import Change, MadeTensors
from ..recompute.step.costs import seconds_for, work_of
from ..recompute.step.recurrent import with_workspace
from ..torch_internals import OpOverload, backward_runs


class StepMemory(NamedTuple):
    """The memory of a step, in bytes."""

    # By category, when their sum is largest: what is held throughout, gradients, activations (still there when the
    # forward pass ends) and temporary.
    at_peak: dict[str, int]
    place: str  # what ran at that moment: the forward pass, the backward pass or the optimizer
    kept: int  # saved for the backward pass of a micro-batch

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


class PlannedStep(NamedTuple):
    """A step whose forward and backward pass can follow one of several plans, in bytes."""

    resident: dict[str, int]  # held throughout both passes (weights, momentum, …), by category
    gradients: int  # that come in the backward pass; 0 if they are held throughout
    optimizer: int  # temporary bytes of the optimiser's step
    # (bytes of the forward and backward pass with the gradients that come, estimated time relative to the baseline's)
    plans: list[tuple[int, float]]

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident.values())

    def needed(self, peak: int) -> int:
        """Bytes of a step whose forward and backward pass take at most `peak`."""
        return self.resident_bytes + max(peak, self.gradients + self.optimizer)

    def budget(self, available: int) -> int:
        """What `available` bytes leave for a budget, which is beside gradients."""
        return available - self.resident_bytes - self.gradients

    def least(self, time: float = math.inf) -> int:
        """The fewest bytes of a step that takes at most `time`."""
        peaks = [peak for peak, plan_time in self.plans if plan_time <= time]
        return self.needed(min(peaks, default=self.plans[0][0]))

    def within(self, available: int) -> tuple[int, float]:
        """Peak and time of the fastest plan with which a step fits; of the plan with the lowest peak if none does."""
        room = available - self.resident_bytes
        fitting = ((peak, time) for peak, time in self.plans if peak <= room)
        return min(fitting, key=itemgetter(1), default=min(self.plans))


class CountedStep(MadeTensors):
    """Context that counts a training step: it runs the forward pass with the loss, the backward pass, the optimiser.

    Tensors count while they exist, and so do workspaces of recurrent layers. There may be several micro-batches.
    `timed`: also add up the estimated seconds of operators.
    """

    def __init__(self, timed: bool = False) -> None:
        super().__init__()
        self.timed = timed
        self.seconds = 0.0
        self.forward_changes = 0  # number of changes when the last forward pass ended
        self.part = "forward"
        self.gradients = set[int | None]()  # numbers

    def place(self) -> str:
        return "backward" if backward_runs() else self.part

    def forward_ends(self, loss: Tensor) -> Tensor:
        """Note that only the loss's backward pass follows; returns the loss."""
        self.forward_changes = len(self.changes)
        return loss

    def backward_ends(self, parameters: Iterable[Tensor]) -> None:
        """Note that only the optimiser's step follows, for the gradients of these parameters."""
        self.part = "optimizer"
        self.gradients = {self.number_of(parameter.grad) for parameter in parameters if parameter.grad is not None}

    def memory(self, resident: dict[str, int], kept: int) -> StepMemory:
        """The step's memory, beside `resident` bytes by category, gradients among them."""
        totals = list(accumulate(change.bytes for change in self.changes))
        moment = totals.index(max(totals))
        kinds: dict[int | None, str] = dict.fromkeys(_bytes_alive(self.changes[: self.forward_changes]), "activations")
        kinds |= dict.fromkeys(self.gradients, "gradients")
        at_peak = resident | {"activations": 0, "temporary": 0}
        for number, size in _bytes_alive(self.changes[: moment + 1]).items():
            at_peak[kinds.get(number, "temporary")] += size
        return StepMemory(at_peak, self.changes[moment].place, kept)

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.timed:
            moved, operations = work_of(function, args, kwargs, result)
            if moved:
                self.seconds += seconds_for(moved, operations, tensors_in(result)[0])
        return result

    def call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return with_workspace(function, args, kwargs, function(*args, **kwargs))


def _bytes_alive(changes: Sequence[Change]) -> dict[int, int]:
    """The bytes of the allocations that these changes leave, by number."""
    freed = {change.number for change in changes if change.bytes < 0}
    return {change.number: change.bytes for change in changes if change.bytes > 0 and change.number not in freed}
