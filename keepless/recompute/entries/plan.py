"""What one sequence of calls keeps or recomputes, and the policy that follows such plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import nn

from ...torch_internals import calling_module
from ..held.values import Value

_MORE = 1.01  # results may be this many times larger than planned, because dimensions are rounded


class Flag:
    """A plan's decision for a call, as bits. No bit: the result is kept, because it cannot be recomputed."""

    KEEP = 1  # only for reports: the result is kept, although it could be recomputed
    AGAIN = 2  # recompute the result and everything the call saved inside
    MASK = 4  # draw a dropout's saved mask again; the result follows from it


@dataclass
class Plan:
    """What one sequence of calls keeps or recomputes."""

    calls: Sequence[Any]  # function of each call, and bytes of all results up to its own
    flags: bytes  # of each call
    peak: int = 0  # bytes
    plain: int = 0  # bytes at the peak of the plain network

    @property
    def fits(self) -> bool:
        """Whether the plain network is within the budget: PyTorch keeps everything itself."""
        return 0 < self.plain <= self.peak

    def flag(self, number: int, function: Any, total: int) -> int | None:
        """The flag of a call; None if this plan has another call there.

        `total`: bytes of all results so far; fewer than planned is allowed.
        """
        if number >= len(self.calls):
            return None
        known, most = self.calls[number]
        return self.flags[number] if known == function and total <= _MORE * most else None


class ByPlan:
    """Follows the plan that matches the calls of the forward pass.

    A result that is recomputed gets a recipe. A result that is kept gets a value, which is released with the original
    unless a reader appears (`Value.unread`). Convolutions, matrix products and the like have rules too. Where no plan
    matches the calls, every result is recomputed that can be, in chains of at most `_LONGEST` recipes: the next result
    is kept.

    Args:
        plans: one for each known sequence of calls of the network.
        size, given: the `Size` whose plans these are, and the sizes of the pass's inputs: see `Plans`.
    """

    def __init__(self, plans: Sequence[Plan] = (), size: Any = None, given: Any = None) -> None:
        self.size, self.given = size, given
        self.plans = list(plans)  # the plans that match the calls of this forward pass so far
        self.call = -1  # number of the current call
        self.total = 0  # bytes of all results so far
        self.left: ref[nn.Module] | None = None  # the module in which the pass has left its plans

    def anew(self) -> "ByPlan":
        """The policy of another pass with these inputs."""
        return ByPlan(self.size.plans, self.size, self.given)

    def next_flag(self, function: Callable[..., Any], bytes: int) -> int | None:
        """The plan's flag for the next call, whose result has so many bytes; None if no plan matches the calls."""
        self.call += 1
        self.total += bytes
        if not self.plans:
            return None
        flag = self.plans[0].flag(self.call, function, self.total)
        if len(self.plans) > 1 or flag is None:
            self.plans = [one for one in self.plans if one.flag(self.call, function, self.total) is not None]
            flag = self.plans[0].flags[self.call] if self.plans else None
            self.left = None if self.plans else calling_module()
        return flag

    def why_kept(self, value: Value) -> str:
        if not self.plans:
            return "no plan"
        is_planned = value.number >= 0 and self.plans[0].flags[value.number] & Flag.KEEP
        return "planned" if is_planned else value.why or "cannot be computed again"
