"""A `Recording` that follows a plan, and traces the step while there is none."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..inputs import tensors_in
from ..recompute.recording import Recording
from ..recompute.rules import EXPENSIVE, FOLLOWED, Again, Function, Rule
from ..recompute.values import Form, Recipe, Saved, Value
from ..saved import Kept, is_ordinary
from ..torch_internals import address
from .execution import Planned
from .step import Kind

_LONG = 2**12  # values


class PlannedRecording(Recording):
    """A `Recording` without other hooks around it.

    Every result of a call that has a rule gets a value: a recipe, or the kept tensor. The latter goes with the tensor
    unless somebody needs it (`Value.unread`). Convolutions, matrix products and the like have rules too. Where no plan
    knows the calls, and in a step that is traced before there is one, the rules of `Recording` decide.
    """

    longest = 2**31  # recipes are computed without recursion

    def __init__(self, planned: Planned, **options: Any):
        super().__init__(**options)
        self.planned, self.trace = planned, planned.trace
        self.lends_anything = False  # that was made here, to the recipe that is being made

    def unpack_hook(self) -> Callable[[Any], Tensor]:
        return super().unpack_hook() if self.trace is None else self.trace.unpack

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.trace is None:
            return function(*args, **kwargs)
        for tensor in filter(is_ordinary, tensors_in(self.arguments)):
            if self.is_made(tensor):  # by code that calls no function
                self.trace.holds(tensor)
            else:
                self.trace.memory(tensor, outside=True)
        return self.trace.run(function, args, kwargs)

    def end_call(self, result: Any) -> None:
        if self.trace is not None:
            for tensor in filter(is_ordinary, tensors_in(result)):
                self.trace.holds(tensor)
            self.trace.settle()

    def forget(self) -> None:
        super().forget()
        if self.trace is not None:
            self.trace.forward = len(self.trace.events)

    def is_short(self, tensor: Tensor) -> bool:
        return super().is_short(tensor) and tensor.numel() < _LONG  # an LSTM's vectors, for example, count

    def rule_of(self, function: Function) -> Rule | None:
        return FOLLOWED.get(function) or EXPENSIVE.get(function)

    def value_of(self, tensor: Tensor) -> Value | None:
        value = super().value_of(tensor)
        if self.trace is not None and value is not None and value.number < 0 and isinstance(value.source, Recipe):
            value.number = self.trace.add(Kind.FOLLOWS, tensor, value.source.inputs())
        return value

    def pack(self, tensor: Tensor) -> Saved | Kept | Form:
        packed = super().pack(tensor)
        if isinstance(packed, Saved) and packed.value.readers == 1 and not packed.value.recipes:
            self._note_need(packed.value, tensor)
        if self.trace is not None and isinstance(packed, (Saved, Form)):
            self.trace.saves(packed, tensor)
            if self.function is None:
                self.trace.settle()
        return packed

    def keep(self, tensor: Tensor) -> Value:
        value = super().keep(tensor)
        if self.trace is not None:
            value.number = self.trace.add(Kind.KEPT, tensor)
        return value

    def note_kept(self, value: Value, tensor: Tensor) -> None:
        """Logged once something needs the value, see `_note_need`."""

    def _note_need(self, value: Value, tensor: Tensor) -> None:
        if isinstance(value.source, Kept):
            self.log.keep(value, tensor, self.function, self.planned.why_kept(value))

    def copied(self, value: Value, tensor: Tensor) -> None:
        """What is kept is the copy."""
        if value.unread:
            value.source, value.storage = Kept(tensor, None), address(tensor.untyped_storage())
            self.known.depends_on_memory(value, tensor)
        if self.trace is not None:
            self.trace.move(value.number, tensor)

    def decide(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Value | None
    ) -> None:
        """Keep the result of a call, or give it a recipe, as planned."""
        assert self.function is not None
        call = (rule, args, kwargs, result, before)
        is_computed = self.planned.is_computed_again(self.function, result)
        again = None
        if is_computed or self.trace is not None:
            self.lends_anything = True
            again = self.again(*call)
            self.lends_anything = False
        if is_computed and again is not None:
            self.follow(again, result)
        elif is_computed is None and self.function in FOLLOWED:
            super().decide(*call)
        own = self.known.find(result) or self.keep(result)
        own.number = self.planned.call
        for saved in self.replaceable:
            saved.read_instead(own)
            own.recipes += 1  # the result may be overwritten, as PyTorch alone does not read it
        if self.trace is not None:
            costs = self.trace.costs(self.function, rule, args, kwargs, result)
            kind, inputs = (Kind.KEPT, ()) if again is None else (Kind.FREE, again.arguments)
            own.number = self.trace.add(kind, result, inputs, costs, self.planned.call, again)
        base = result._base
        if base is not None and base.numel() == result.numel() and self._is_new(base, (*args, *kwargs.values())):
            whole = self.known.find(base) or self.keep(base)  # other views of it follow
            whole.number = own.number

    def _is_new(self, base: Tensor, arguments: Sequence[Any]) -> bool:
        """Whether a call has made the memory of its result, of which that is a view."""
        memory = address(base.untyped_storage())
        given = filter(is_ordinary, tensors_in(arguments))
        return self.is_made(base) and all(address(tensor.untyped_storage()) != memory for tensor in given)

    def may_read_instead(self, value: Value) -> bool:
        return True

    def argument_value(self, tensor: Tensor, result: Tensor, before: Value | None) -> Value | None:
        value = super().argument_value(tensor, result, before)
        if not self.lends_anything:
            return None if value is not None and value.unread else value
        if value is None and tensor is not result and self.is_made(tensor):
            value = self.keep(tensor)
        if value is not None and value.unread:
            self._note_need(value, tensor)
        return value

    def value_before(self, overwritten: Tensor, before: Value | None) -> Value | None:
        if not self.lends_anything or self.trace is None:
            return super().value_before(overwritten, before)
        value = before or self.known.find(overwritten, overwrites=1)
        return value if value is not None and self.trace.overwrite(value, overwritten) else None

    def bytes_for_nothing_else(self, again: Again) -> int:
        return 0 if self.lends_anything else super().bytes_for_nothing_else(again)
