"""Follow a plan in a forward pass: call by call, keep a result or compute it again."""

import weakref
from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..recompute.calls import Call, Inside
from ..recompute.known_values import KnownValues
from ..recompute.recipes import follow, how_to_repeat
from ..recompute.recording import Policy
from ..recompute.report import KeptTensor, Log
from ..recompute.rules import Rule
from ..recompute.values import Again, Recipe, Value
from ..saved import Kept, is_ordinary, laid_out
from ..torch_internals import address, node_number
from .step import Plan
from .trace import StepTrace


class ByPlan(Policy):
    """Follows the plan whose calls the forward pass repeats.

    A result that is computed again gets a recipe. One that is kept gets a value once something reads it, or at once if
    the step is traced; it is released with the original unless a reader appears (`Value.unread`). Convolutions, matrix
    products and the like have rules too. Where no plan knows the calls, a guard decides.

    Args:
        plans: of the network's different sequences of calls.
        trace: sees the step, if it is to be planned.
        guard: None to keep every result there.
        kept_before: tensors that an earlier pass under the plan kept, for a report. None: hooks in all calls of this
            pass find out.
    """

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        trace: StepTrace | None = None,
        guard: "Guard | None" = None,
        kept_before: Sequence[KeptTensor] | None = None,
    ):
        self.plans = list(plans)  # those whose calls this forward pass has repeated so far
        self.trace: StepTrace | None = trace
        self.strayed = False  # from all plans
        self.call = -1
        self.total = 0  # bytes of all results so far
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
        self.total += result.nbytes
        self.strayed = not self.plans[0].knows(self.call, function, self.total)
        if self.strayed:
            self.plans = []
        return self.strayed

    def is_unhooked(self, function: Callable[..., Any]) -> bool:
        if not self.plans:
            return False
        plan, number = self.plans[0], self.call + 1
        return number in plan.unhooked and bool(plan.calls[number][0] == function)

    def stays(self, call: Call, result: Tensor) -> bool:
        plan, number = self.plans[0], self.call + 1
        if len(self.plans) > 1 or plan.computes(number) or not is_ordinary(result):
            return False
        if not plan.knows(number, call.function, self.total + result.nbytes):
            return False
        self.call = number
        self.total += result.nbytes
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

    def why_kept(self, value: Value | Kept, node: int) -> str:
        """`node`: number of the node that made the tensor."""
        if not self.plans:
            return "no plan"
        number = value.number if isinstance(value, Value) and self.trace is None else -1  # a trace has its own numbers
        call = self.planned.get(node, number)
        return "planned" if call in self.plans[0].kept else "cannot be computed again"

    def decide(self, known: KnownValues, rule: Rule, call: Call, result: Tensor) -> None:
        trace = self.trace
        is_computed = self.is_computed_again(call.function, result)
        inside = bool(self.plans) and self.call in self.plans[0].inside
        if is_computed is False and trace is None and not (inside or call.replaceable or call.overwrites):
            if known.find(result) is None:
                self._plan(call, result)
                return
        if trace is not None:
            self.planned[node_number(result.grad_fn)] = self.call
        guard = self.guard if is_computed is None else None  # no plan knows this call
        again = whole = bundle = None
        if is_computed or guard is not None or trace is not None:
            again = how_to_repeat(known, rule, call, result)
        rule_inside = call.row.inside
        if rule_inside is not None and call.inside and (inside or guard is not None or trace is not None):
            whole = again if rule_inside is rule else None
            whole = whole or how_to_repeat(known, rule_inside, call, result)
        reads_overwritten = call.before is not None and _reads_overwritten(call.before, call, result)
        either = None if reads_overwritten else again or whole
        if guard is not None and either is not None:
            is_computed = inside = guard.computes(either, result)
        if inside and whole is not None:
            made = Bundle(whole, call, result)
            if again is not None and rule_inside is rule:
                bundle, again = made, made.result()
        own = follow(known, again, call, result) if is_computed and again is not None else None
        own = own or known.find(result) or known.keep(result)
        if isinstance(own.source, Recipe):
            own.bytes = result.nbytes  # for the guard
        own.number = self.call
        if bundle is not None:
            bundle.parts.append(weakref.ref(own))
        for saved in call.replaceable:
            saved.read_instead(own)
            own.recipes.append(weakref.ref(saved))  # the result may be overwritten, as PyTorch alone does not read it
        if trace is not None:
            own.number = trace.result(call, rule, result, again, whole, self.call)
        base = result._base
        if base is not None and base.numel() == result.numel() and call.has_made(base):
            of_base = known.find(base) or known.keep(base)  # other views of it follow
            of_base.number = own.number

    def is_computed_again(self, function: Callable[..., Any], result: Tensor) -> bool | None:
        """Whether the next call's result is computed again; None if no plan knows these calls."""
        self.call += 1
        self.total += result.nbytes
        if self.trace is not None:
            self.trace.calls.append((function, self.total))
        if not self.plans:
            return None
        self.plans = [plan for plan in self.plans if plan.knows(self.call, function, self.total)]
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


class Bundle(Value):
    """All tensors that a call makes when it runs again. Each part gets its own, and frees it after its last reader.

    Args:
        again: repeats the call.
        call: in the forward pass; the parts are `call.inside`, beside its result.
    """

    __slots__ = ("parts",)

    def __init__(self, again: Again, call: Call, result: Tensor):
        inside = call.inside
        needs_grad = [isinstance(a, Tensor) and a.requires_grad for a in call.arguments][: len(again.arguments)]
        originals = [_kept(part.value) for part in inside]
        function: Any = _Rerun(again.function, needs_grad, inside, originals)
        super().__init__(_WholeCall(again._replace(function=function, can_overwrite=False), result))
        self.parts = [weakref.ref(part.value) for part in inside]
        for position, (part, original) in enumerate(zip(inside, originals, strict=True)):
            part.value.become(Recipe(Again(itemgetter(position), [self]), original))

    def result(self) -> Again:
        """Recipe of the call's result, whose value is to be appended to `parts`."""
        return Again(itemgetter(len(self.parts)), [self])

    def steps(self) -> Generator[Value, Any, Any]:
        assert isinstance(self.source, Recipe)
        tensors = yield from self.source.steps()
        for reference, tensor in zip(self.parts, tensors, strict=False):
            part = reference()
            if part is not None and part.readers and part.computed is None and isinstance(part.source, Recipe):
                part.hold(tensor)
        return tensors


def _kept(value: Value) -> Tensor:
    assert isinstance(value.source, Kept)
    return value.source.get()


class _WholeCall(Recipe):
    """Computes a list of tensors."""

    __slots__ = ()

    def finished(self, result: Any) -> Any:
        return result


class _Rerun:
    """Runs a function with gradients, as in the forward pass; returns what it saves inside, and its result."""

    def __init__(
        self,
        function: Callable[..., Any],
        needs_grad: Sequence[bool],
        inside: Sequence[Inside],
        originals: Sequence[Tensor],
    ):
        self.function, self.needs_grad = function, needs_grad
        self.positions = {part.number: (position, part.is_base) for position, part in enumerate(inside)}
        self.forms = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in originals]

    def __call__(self, *arguments: Any) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        number = -1

        def pack(tensor: Tensor) -> None:
            nonlocal number
            number += 1
            if number in self.positions:
                position, is_base = self.positions[number]
                base = tensor._base
                found[position] = (base if is_base and base is not None else tensor).detach()

        given = [
            one.detach().requires_grad_(needs) if isinstance(one, Tensor) else one
            for one, needs in zip(arguments, self.needs_grad, strict=True)
        ]
        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            result = self.function(*given)
        tensors = [found[position] for position in sorted(found)]
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != [form[:2] for form in self.forms]:
            raise RuntimeError(
                f"{self.function} has run again for the backward pass, and has saved other tensors than in the forward "
                f"pass: a function must do the same each time to be trained within a budget"
            )
        laid_out_alike = map(laid_out, tensors, (stride for *_, stride in self.forms))
        return [*laid_out_alike, result.detach()]


def _never(_: object) -> Tensor:
    raise AssertionError("the graph of a call that ran again is not differentiated")


def _reads_overwritten(before: Value, call: Call, result: Tensor) -> bool:
    """Whether a call has written over a kept value that it reads: only by a plan is its result then computed again."""
    return result is call.args[0] and before.reads_storage(address(result.untyped_storage()))
