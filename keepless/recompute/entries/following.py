"""A forward pass that follows learned entries. Calls that differ from them are recorded."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...saved import PLAIN, Kept, current_stream
from ...torch_internals import (
    calling_module,
    current_hooks,
    dispatch_modes_on,
    hooks_are_allowed,
    is_observed,
    pop_hooks,
    push_hooks,
    raw_stream,
    unpack,
)
from ..held.calls import Call
from ..held.signs import Signs
from ..held.values import Again, Saved, Value
from ..table.functions import DRAWN, body, is_still, row_of
from ..table.rules import ByName, attention, by_present_backends
from .code import DEEPEST, look_again, may_write, watched
from .entry import END, FOUND, ITSELF, OWN, RULES, Entry, Script
from .learning import Lesson
from .plan import MORE, ByPlan
from .recipes import give_recipe, leave_own_inside, note_random, of_inside, read_result_instead
from .recording import Recording
from .registry import KnownValues

_is_compiling = torch.compiler.is_dynamo_compiling
_enter: Any = TorchFunctionMode.__enter__
_leave: Any = TorchFunctionMode.__exit__
_SHARE = 4  # a pass leaves its plan if more than one call in so many differs; missing calls do not count
_NEAR = 8  # a call that is not the next one is looked for among so many entries, as others may be missing


_DETACHES = frozenset([Tensor.detach, torch.detach])


class _Packing:
    """What autograd gets for the tensors that the running call saves."""

    kinds: Iterator[Any]  # for the tensors that are still to be saved: see `Entry.packs`
    value: Value | None  # of the result
    call: Call | None = None  # if rules decide about it
    own: Tensor | None = None  # the result, if the call has saved it
    packed: list[Any] | None = None  # what autograd holds, if recipes read it


class Following(Recording):
    """Context of a forward pass that follows a script.

    Args:
        script: learned from an earlier pass with such inputs.
        by_plan: there is a budget.
        inputs, frame: see `Recording`.
    """

    def __init__(
        self,
        script: Script,
        by_plan: bool,
        *,
        inputs: Sequence[Tensor] = (),
        frame: Any = None,
    ):
        super().__init__(None, inputs=inputs, frame=frame)
        self.script = script
        self.by_plan = by_plan
        self.entries = script.entries
        self.next = 0  # number of the next entry
        self.packing: Any = None  # of the running call
        self.stream: torch.cuda.Stream | None = None  # the current one
        self.stream_address = 0
        self.leaves = False  # the rest of the pass is recorded
        self.left_at: int | None = None  # the number of the next entry when too many calls had differed
        self.has_sought = False  # the entry of the running call has been looked up by its parameter
        self.outdated = False  # a call that dropped nothing may do so now
        self.differences = 0  # recorded calls, surprises, and returns to earlier entries
        self.lesson: Lesson = Lesson()  # of the calls that the recorder makes: see `grown`
        self.places: list[int] = []  # of each recorded call: the number of the next entry

    def __enter__(self) -> "Following":
        for one in self.inputs:
            if one.is_cuda and raw_stream is not None:
                self.stream_address, self.stream = raw_stream(one.device.index), current_stream(one)
        self.known = KnownValues(self.inputs, None, False, self.by_plan)
        self.known.log.is_on = False  # `script.kept` says what entries keep
        self.inputs, self.hook = (), self.pack  # made once
        self.modes = dispatch_modes_on()
        if self.script.has_hooks:
            self.hooks = saved_tensors_hooks(self.known.pack, unpack)
            self.hooks.__enter__()
        _enter(self)
        return self

    def forget(self, has_raised: bool) -> None:
        super().forget(has_raised)
        if not self.leaves:
            self.kept = [*self.script.kept, *self.kept]
            self.policy = None  # the pass has followed its plan, except in a few calls
        self.entries, self.next = [END], 0  # after Ctrl-C, it may still see calls
        del self.hook  # PyTorch holds `pack`, and so this object, as long as the graph

    @property
    def has_followed(self) -> bool:
        """Whether entries have made all calls of the pass, and hold for further ones."""
        return not (self.differences or self.is_outdated)

    @property
    def is_outdated(self) -> bool:
        """Whether calls that drop nothing now would drop something, or results are larger than planned."""
        return self.outdated or self.lesson.sized > MORE * self.script.sized

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_compiling():
            return function(*args, **kwargs) if kwargs else function(*args)
        entry = self.entries[self.next]
        known = entry.function
        if known is function or known == function:  # Python makes `Tensor.shape`'s getter anew for each call
            self.next += 1
            if (run := entry.run) is not None:
                return run(self, function, types, args, kwargs or {})
            if kwargs:
                if "out" in kwargs:
                    return self.writing(function, args, kwargs)
                if entry.options is not None and kwargs != entry.options:
                    return watched(entry, may_write, self, function, types, args, kwargs)
                result = function(*args, **kwargs)
            else:
                result = function(*args)
            if entry.is_flat and getattr(result, "requires_grad", False):
                self.looks_again(entry)
            return result
        if row_of(function).only_asks and PLAIN.issuperset(types):
            return function(*args, **kwargs) if kwargs else function(*args)
        return self._other(function, types, args, kwargs or {})

    def _other(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of another function than the next entry's; perhaps one that is opened, and so has no entry."""
        if self.modes and is_observed():
            return function(*args, **kwargs)
        if self.entries[self.next].asks:
            while self.entries[self.next].asks:
                self.next += 1
            return self.__torch_function__(function, types, args, kwargs)
        if self.is_abandoned():
            return function(*args, **kwargs)
        if row_of(function).is_opened and PLAIN.issuperset(types):
            _enter(self)
            try:
                return body(function)(*args, **kwargs)
            finally:
                _leave(self, None, None, None)
        if not self.leaves and self._goes_on_elsewhere(function, args):
            return self.__torch_function__(function, types, args, kwargs)
        return self.interpret(function, types, args, kwargs)

    def _goes_on_elsewhere(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Go on at another entry, if one is found for this call: calls between them may be missing."""
        now = self.next
        if (place := self._place(function, args)) is None:
            near = self.entries[now + 1 : now + _NEAR]
            place = next((now + 1 + number for number, one in enumerate(near) if function == one.function), None)
        if place is not None:
            self._go_to(place)
        return place is not None

    def _go_to(self, place: int) -> None:
        """Continue with another entry."""
        if place < self.next:
            self._note_difference()
        elif not _DETACHES.isdisjoint([one.function for one in self.entries[self.next : place]]):
            self.note_outdated()  # what follows may have a graph now
        if not self.leaves:
            self.next = place

    def leave(self) -> None:
        """Record the rest of the pass."""
        self.leaves, self.entries, self.next = True, [END], 0

    def _place(self, function: Any, args: tuple[Any, ...]) -> int | None:
        """The number of the first entry that reads the same parameter, if its function is the same."""
        for one in args:
            if isinstance(one, nn.Parameter):
                place = self.script.consumers.get(id(one))
                return place if place is not None and self.entries[place].function == function else None
        return None

    def with_hooks(
        self, entry: Entry, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any, own: Value | None
    ) -> tuple[Any, _Packing | None]:
        """Run a call that saves dropped tensors. `own`: the value of its result.

        If hooks are disabled, the rules run it, and there is no `_Packing`.
        """
        self.packing = packing = _Packing()
        packing.kinds, packing.value = iter(entry.packs), own
        if entry.reads_packed:
            packing.packed = []
        if entry.asks_rules:
            self.known.settle_gone()
            self.known.call = packing.call = call = Call(function, entry.row, args, kwargs)
            call.overwrites = entry.writes
            if any([make.draws for make in entry.makes]):
                note_random(call)
        try:
            push_hooks(self.hook, unpack)  # inside the try, because Ctrl-C may come right after it
            result = function(*args, **kwargs) if kwargs else function(*args)
        except BaseException as error:
            is_pushed = hooks_are_allowed()
            if is_pushed:
                pop_hooks()
            if is_pushed or not isinstance(error, RuntimeError):
                raise
        else:
            pop_hooks()
            return result, packing
        finally:
            self.packing = self.known.call = None
        return self.unlike(function, types, args, kwargs), None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that the running call saves."""
        packing, known = self.packing, self.known
        kind = next(packing.kinds, None)  # None as well if the call saves more than when it was learned
        value: Value | None = None
        if known.exposed.found and known.is_exposed(tensor):
            kind = RULES
        elif kind is OWN:
            packing.own, value = tensor, packing.value
        elif kind is None or kind is ITSELF or kind is FOUND:
            one = known.found[key] if (key := id(tensor)) in known.found else None
            if one is not None and one[0]() is tensor and one[1] == tensor._version:
                value = one[2]
            elif kind is FOUND:
                value = known.derived(tensor)
            if value is not None and type(value.source) is Kept:
                value = None  # autograd gets its own `Kept`: `KnownValues.give` detaches the recipes'
        elif kind is not RULES:
            one = known.masks.get(mask := (id(tensor), kind))
            if one is None or one[0]() is not tensor or one[1] != tensor._version:
                one = known.masks[mask] = ref(tensor), tensor._version, Value(Signs(tensor, kind, None)), 0
            value = one[2]
        if value is not None:
            saved: Any = Saved(value, known.memories, tensor)
        else:
            saved = known.packed(tensor) if kind is RULES else Kept(tensor, None, detaches=kind is not ITSELF)
        if kind is not RULES and packing.call is not None:
            packing.call.saves += 1
        if packing.packed is not None:
            packing.packed.append(saved)
        return saved

    def concluded(self, entry: Entry, packing: _Packing, result: Tensor, given: list[list[Any]]) -> bool:
        """Note what a call drops, as the recorder does. False: it has not done what the entry expects.

        `given`: the arguments of each recipe.
        """
        known, call = self.known, packing.call
        assert call is not None
        if packing.own is not None and packing.value is not None:
            known.remember(result, packing.value)
        if call.inside:
            leave_own_inside(known, call, result)
        for make, arguments in zip(entry.makes, given, strict=True):
            function = by_present(make.function) if entry.row.again is attention else make.function
            if make.draws:
                if call.random is None:
                    return False
                function = partial(call.random.call, function)
            again = Again(function, arguments, make.how.fresh, make.how.can_overwrite)
            if make.is_inside and len(call.inside) + make.is_whole != make.outputs:
                return False
            if make.is_inside and not make.is_whole:
                of_inside(again, call, None)
            elif give_recipe(known, again, call, result, make.is_whole, DEEPEST) is None:
                return False
        if entry.is_kept:
            read_result_instead(known, call, known.find(result) or known.keep(result), call.replaceable)
        return True

    def unlike(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that differs from its entry and has not run yet: try the next entry, then its parameter's."""
        if self.leaves:
            return self.interpret(function, types, args, kwargs)
        if self.entries[self.next - 1].is_still and function in DRAWN and not is_still(function, args, kwargs):
            self.note_outdated()
        if self.entries[self.next].function == function:
            return self.__torch_function__(function, types, args, kwargs)
        if not self.has_sought and (place := self._place(function, args)) is not None and place != self.next - 1:
            self.has_sought = True
            try:
                self._go_to(place)
                return self.__torch_function__(function, types, args, kwargs)
            finally:
                self.has_sought = False
        return self.interpret(function, types, args, kwargs)

    def surprised(self, packing: _Packing | None, result: Any) -> Any:
        """After a call that has not done what its entry expects: its result is kept."""
        self._note_difference()
        if packing is not None and packing.own is not None and packing.value is not None:
            packing.value.source = Kept(packing.own, None)
            self.known.unnoted.append(packing.value)
        return result

    def interpret(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call."""
        self._note_difference()
        self.known.note_memories()
        outer, ours = self.hooks, saved_tensors_hooks(self.known.pack, unpack)
        if not (self.is_innermost() or (current_hooks() is None and hooks_are_allowed())):
            return super().__torch_function__(function, types, args, kwargs)
        self.hooks, self.known.log.is_on = ours, True
        try:
            ours.__enter__()  # inside the try, because Ctrl-C may come right after it
            return super().__torch_function__(function, types, args, kwargs)
        finally:
            ours.__exit__()
            self.hooks, self.known.log.is_on = outer, False

    def note_outdated(self) -> None:
        if not self.outdated:
            self.outdated, self.left = True, calling_module()

    def looks_again(self, entry: Entry) -> None:
        """In the next pass, the rules decide about a call whose result has got a gradient."""
        self.note_outdated()
        entry.run = partial(look_again, entry, entry.run)

    def run_noted(self, *call: Any) -> Any:
        self.places.append(self.next if self.left_at is None else self.left_at)
        return super().run_noted(*call)

    def _note_difference(self) -> None:
        self.differences += 1
        if self.policy is None and self.by_plan:
            self.policy = ByPlan()
            self.policy.leave()
        if self.policy is not None and not self.leaves and _SHARE * self.differences > self.script.learned:
            self.left_at = self.next
            self.leave()


def by_present(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recipe's attention function, with the backends that are enabled now."""
    named, now = getattr(function, "__self__", None), by_present_backends(F.scaled_dot_product_attention)
    return named._replace(function=now).call if isinstance(named, ByName) else now
