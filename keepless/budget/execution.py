"""Follow a plan in a forward pass: call by call, keep a result or compute it again."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..recompute.calls import Call
from ..recompute.recording import Recording
from ..recompute.report import KeptTensor, Log
from ..recompute.rules import Rule
from ..recompute.values import Again, Recipe, Value
from ..saved import Kept, is_ordinary
from ..torch_internals import address, node_number
from .step import Plan
from .trace import StepTrace


class ByPlan:
    """Policy of a `Recording`: follows the plan whose calls the forward pass repeats.

    A result that is computed again gets a recipe. One that is kept gets a value once something reads it, or at once if
    the step is traced; it is released with the original unless a reader appears (`Value.unread`). Convolutions, matrix
    products and the like have rules too. Where no plan knows the calls, a guard decides.

    Args:
        plans: of the network's different sequences of calls.
        trace: sees the step, if it is to be planned.
        guard: None to keep every result there.
        kept_before: what an earlier pass kept by the plan, for a report. None: this pass is to tell, by hooks in all
            calls.
    """

    sees_calls = True
    longest = 2**31  # recipes are computed without recursion
    short = 2**12  # an LSTM's vectors, for example, count
    repeats_all = True
    copies_are_worth = 4  # of a projection to queries, keys and values, say, which may be computed again itself

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        trace: StepTrace | None = None,
        guard: "Guard | None" = None,
        kept_before: Sequence[KeptTensor] | None = None,
    ):
        self.plans = list(plans)  # those whose calls this forward pass has repeated so far
        self.trace = trace
        self.strayed = False  # from all plans
        self.call = -1
        self.guard = guard
        self.kept_before = kept_before
        self.kept: Sequence[KeptTensor] = ()  # at the end of the forward pass
        self.skips_hooks = kept_before is not None and trace is None
        self.watches = self.skips_hooks and len(plans) == 1 and 0 < plans[0].plain <= plans[0].peak
        self.planned: dict[int, int] = {}  # calls whose results are kept, by the number of the node

    def has_ended(self) -> bool:
        """Whether the pass has repeated all calls of a plan."""
        return bool(self.plans) and self.call + 1 == len(self.plans[0].calls)

    def strays(self, function: Callable[..., Any], result: Tensor) -> bool:
        self.call += 1
        calls = self.plans[0].calls
        if self.call < len(calls) and calls[self.call] == (function, result.shape, result.dtype):
            return False
        self.plans, self.strayed = [], True
        return True

    def is_unhooked(self, function: Callable[..., Any]) -> bool:
        if not self.plans:
            return False
        plan, number = self.plans[0], self.call + 1
        return number in plan.unhooked and plan.calls[number][0] is function

    def stays(self, call: Call, result: Tensor) -> bool:
        plan, number = self.plans[0], self.call + 1
        if len(self.plans) > 1 or plan.computes(number) or not is_ordinary(result):
            return False
        if plan.calls[number] != (call.function, result.shape, result.dtype):
            return False
        self.call = number
        self._plan(call, result)
        return True

    def _plan(self, call: Call, result: Tensor) -> None:
        """Note that the result of the present call is kept, with the memory that it is a view of."""
        self.planned[node_number(result.grad_fn)] = self.call
        base = result._base
        if base is not None and base.numel() == result.numel() and call.has_made(base):
            self.planned[node_number(base.grad_fn)] = self.call  # other views of it follow

    def kept_in(self, log: Log) -> Sequence[KeptTensor]:
        before = None if self.strayed else self.kept_before
        self.kept = log.kept(self.why_kept) if before is None else before
        return self.kept

    def may_read_result(self, argument: Value) -> bool:
        return True

    def why_kept(self, value: Value | Kept, node: int) -> str:
        """`node`: number of the node that made the tensor."""
        if not self.plans:
            return "no plan"
        number = value.number if isinstance(value, Value) and self.trace is None else -1  # a trace has its own numbers
        call = self.planned.get(node, number)
        return "planned" if call in self.plans[0].kept else "cannot be computed again"

    def decide(self, recording: Recording, rule: Rule, call: Call, result: Tensor) -> None:
        known, trace = recording.known, self.trace
        is_computed = self.is_computed_again(call.function, result)
        inside = bool(self.plans) and self.call in self.plans[0].inside
        if is_computed is False and trace is None and not (inside or call.replaceable or call.overwrites):
            if known.find(result) is None:
                self._plan(call, result)
                return
        if trace is not None:
            self.planned[node_number(result.grad_fn)] = self.call
        is_open = is_computed is None and self.guard is not None
        again = whole = bundle = None
        if is_computed or is_open or trace is not None:
            again = recording.again(rule, call, result, from_anything=True)
        if call.inside and (inside or is_open or trace is not None):
            whole = again if call.traits.inside is rule else None
            whole = whole or recording.again(call.traits.inside, call, result, from_anything=True)
        reads_overwritten = call.before is not None and _reads_overwritten(call.before, call, result)
        either = None if reads_overwritten else again or whole
        if self.guard is not None and is_computed is None and either is not None:
            is_computed = inside = self.guard.computes(either, result)
        if inside and whole is not None:
            made = recording.bundle(whole, call, result)
            if again is not None and call.traits.inside is rule:
                bundle, again = made, made.result()
        own = recording.follow(again, call, result) if is_computed and again is not None else None
        own = own or known.find(result) or known.keep(result, call)
        if isinstance(own.source, Recipe):
            own.bytes = result.nbytes  # for the guard
        own.number = self.call
        if bundle is not None:
            bundle.parts.append(weakref.ref(own))
        for saved in call.replaceable:
            saved.read_instead(own)
            own.recipes += 1  # the result may be overwritten, as PyTorch alone does not read it
        if trace is not None:
            own.number = trace.result(call, rule, result, again, whole, self.call)
        base = result._base
        if base is not None and base.numel() == result.numel() and call.has_made(base):
            of_base = known.find(base) or known.keep(base, call)  # other views of it follow
            of_base.number = own.number

    def is_computed_again(self, function: Callable[..., Any], result: Tensor) -> bool | None:
        """Whether the next call's result is computed again; None if no plan knows these calls."""
        self.call += 1
        kind = (function, result.shape, result.dtype)
        if self.trace is not None:
            self.trace.calls.append(kind)
        if not self.plans:
            return None
        self.plans = [plan for plan in self.plans if self.call < len(plan.calls) and plan.calls[self.call] == kind]
        self.strayed = not self.plans
        return None if self.strayed else self.call in self.plans[0].again


class Guard:
    """Keeps few bytes where nothing is known of what will be called.

    A result is kept once computing it again would take more bytes than all that was kept before, and otherwise computed
    again. Of n layers of one size about sqrt(2 n) are kept, with as many layers between the last two (compare [Chen et
    al.](https://arxiv.org/abs/1604.06174)).
    """

    def __init__(self) -> None:
        self.kept = 0  # bytes

    def computes(self, again: Again, result: Tensor) -> bool:
        """Whether a result is computed again."""
        size = result.nbytes
        waiting = [one for one in again.arguments if isinstance(one, Value)]
        seen = set(waiting)
        while waiting and size <= self.kept:
            value = waiting.pop()
            if isinstance(value.source, Recipe):
                size += value.bytes
                inputs = [one for one in value.source.inputs if one not in seen]
                seen.update(inputs)
                waiting += inputs
        if size > self.kept:
            self.kept += result.nbytes
            return False
        return True


def _reads_overwritten(before: Value, call: Call, result: Tensor) -> bool:
    """Whether a call has written over a kept value that it reads, so that a plan alone can let it be computed again."""
    return result is call.args[0] and before.reads_storage(address(result.untyped_storage()))
