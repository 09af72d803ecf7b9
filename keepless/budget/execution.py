"""Which results of a forward pass are computed again: decided for a number of bytes, and followed call by call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..recompute.values import Value
from .trace import StepTrace


class Plan(NamedTuple):
    """What one sequence of calls keeps."""

    calls: Sequence[Any]  # function, shape and dtype of each call's result
    again: frozenset[int]  # calls whose results are computed again
    kept: frozenset[int] = frozenset()  # calls whose results could be computed again, but are kept


class Planned:
    """Tells a `Recording` what to keep of each call, by the plan whose calls the forward pass repeats."""

    def __init__(self, plans: Sequence[Plan] = (), trace: StepTrace | None = None):
        self.plans = list(plans)
        self.strayed = False  # from all plans
        self.trace = trace
        self.call = -1

    def why_kept(self, value: Value) -> str:
        """Why a value is kept, for a report."""
        if not self.plans:
            return "no plan"
        return "planned" if value.number in self.plans[0].kept else "cannot be computed again"

    def is_computed_again(self, function: Callable[..., Any], result: Tensor) -> bool | None:
        """Whether the next call's result is computed again; None if no plan knows these calls."""
        self.call += 1
        kind = (function, result.shape, result.dtype)
        if self.trace is not None:
            self.trace.calls.append(kind)
        known, self.plans = (
            self.plans,
            [plan for plan in self.plans if self.call < len(plan.calls) and plan.calls[self.call] == kind],
        )
        self.strayed = self.strayed or bool(known and not self.plans)
        return self.call in self.plans[0].again if self.plans else None
