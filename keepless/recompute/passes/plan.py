"""What one sequence of calls keeps or recomputes, and the policy that follows such plans."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..held.values import Value

MORE = 1.01  # results may be so many times larger than planned, because networks round dimensions


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
    plain: int = 0  # bytes at the peak of the baseline, which recomputes nothing
    remarks: Sequence[str] = field(default=(), compare=False)  # texts of warnings about it

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return self.calls[-1][1] if self.calls else 0

    @property
    def fits(self) -> bool:
        """Whether the baseline is within the budget: then further passes drop nothing."""
        return 0 < self.plain <= self.peak


class ByPlan:
    """Follows a plan call by call, as long as it matches the calls of the forward pass.

    Then every result is recomputed that can be, but the result after `LONGEST` recipes in a row is kept.
    """

    def __init__(self, plan: Plan | None = None, slack: int = 0) -> None:
        self.plan = plan  # None once a call has differed from it
        self.slack = slack  # bytes: see `Signature.slack`
        self.call_number = -1  # number of the current call
        self.result_bytes = 0  # bytes of all results so far
        self.planned_bytes = plan.bytes if plan is not None and plan.calls else sys.maxsize  # of all results
        self.excess_bytes = 0  # bytes of results beyond those planned, once there are more

    def take_flag(self, function: Callable[..., Any], bytes: int) -> int | None:
        """Go on to the next call, whose result has so many bytes, and return the plan's flag for it.

        None if the plan does not match the calls, from now on. Fewer bytes than planned are allowed.
        """
        self.call_number += 1
        self.result_bytes += bytes
        calls = () if self.plan is None else self.plan.calls
        is_planned = self.call_number < len(calls) and calls[self.call_number][0] == function
        most = calls[self.call_number][1] if is_planned else self.planned_bytes
        if self.result_bytes > MORE * most + self.slack:
            self.excess_bytes = self.result_bytes - most
        elif is_planned and self.plan is not None:
            return self.plan.flags[self.call_number]
        self.plan = None
        return None

    def why_kept(self, value: Value) -> str:
        """Why a value is kept, for reports."""
        if self.plan is None:
            return "no plan"
        is_planned = value.number >= 0 and self.plan.flags[value.number] & Flag.KEEP
        return "planned" if is_planned else value.why or "cannot be computed again"
