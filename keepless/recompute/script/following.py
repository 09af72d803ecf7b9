"""Run a learned step: compare each call with its entry, and let the recorder make those that differ."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...saved import PLAIN, is_ordinary
from ...torch_internals import (
    address,
    calling_module,
    current_hooks,
    hooks_are_allowed,
    next_node_number,
    pop_hooks,
    push_hooks,
    raw_stream,
    unpack,
    without_function_modes,
)
from ..held.values import Again, Recipe, Value
from ..recorder.known_values import KnownValues
from ..recorder.lesson import Lesson
from ..recorder.plan import ByPlan
from ..recorder.recording import SETS_DATA, Recording
from ..table.functions import body, row_of
from ..table.rules import may_overwrite, overwritten
from .code import as_code
from .handles import Handles, Packing
from .script import END, MAY_WRITE, WRITES, Act, Entry, Keep, Script, Slot

_is_compiling = torch.compiler.is_dynamo_compiling
_enter: Any = TorchFunctionMode.__enter__
_leave: Any = TorchFunctionMode.__exit__
_FEW = 4  # a pass leaves its plan if one call in so many differs
_NEAR = 8  # entries: calls that have gone are looked for among so many


class Interpreter(KnownValues):
    """The recorder's registry in a pass by a script, for single calls. It finds what the script has dropped or kept."""

    def __init__(self, handles: Handles, by_plan: bool):
        super().__init__((), None, False, by_plan)
        self.handles = handles

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        value = super().find(tensor, overwrites=overwrites)
        if value is not None or overwrites or (handle := self.handles.find(tensor)) is None or not is_ordinary(tensor):
            return value
        if type(handle) is Keep:
            value = self.keep(tensor)
            value.count(1)  # the script's recipes read it
        else:
            handle.taken += 1
            recipe = Recipe(Again(handle.look, ()), tensor)
            recipe.depth = handle.depth
            value = self.remember(tensor, Value(recipe))
        return value


class Following(Recording):
    """Context of a forward pass that follows a script.

    Args:
        script: of an earlier pass with inputs of this form.
        make_policy: makes the policy for calls that differ from a plan. None: there is no budget.
        inputs, frame: see `Recording`.
    """

    def __init__(
        self,
        script: Script,
        make_policy: Callable[[], ByPlan] | None,
        *,
        inputs: Sequence[Tensor] = (),
        frame: Any = None,
    ):
        super().__init__(None, inputs=inputs, frame=frame)
        self.script = script
        self.make_policy = make_policy
        self.entries = script.entries
        self.next = 0  # number of the next entry
        self.handles = Handles()
        self.stream = 0
        self.leaves = False  # the rest of the pass is recorded
        self.left_at: int | None = None  # the number of the next entry when too many calls had differed
        self.first = 0  # number of the entry of the opened function that is running
        self.has_sought = False  # the running call has been looked for among all entries
        self.differences = 0  # calls that the recorder has made, or an earlier entry again
        self.lesson = Lesson()  # of the calls that the recorder makes: see `grown`
        self.places: list[int] = []  # of each, the number of the next entry

    def __enter__(self) -> "Following":
        self.outside = {address(one.untyped_storage()) for one in self.inputs if is_ordinary(one)}
        cuda = next((one for one in self.inputs if one.is_cuda), None)
        self.stream = 0 if cuda is None or raw_stream is None else raw_stream(cuda.device.index)
        self.inputs, self.start = (), next_node_number()
        if self.script.has_hooks:
            self.hooks = saved_tensors_hooks(self._saved_outside, unpack)
            self.hooks.__enter__()
        _enter(self)
        return self

    def forget(self) -> None:
        kept = self.script.kept
        if self.handles.known is not None:
            super().forget()
            kept = self.kept if self.leaves else [*kept, *self.kept]
        if not self.leaves:
            self.policy = None  # the pass has followed its plan, but for few calls
        self.kept, self.frame = kept, None
        self.entries, self.next = [END], 0  # after Ctrl-C, it may still see calls
        self.handles.clear()

    def _saved_outside(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor, where `Handles.pack` does not decide it."""
        with without_function_modes():
            return self.handles.held(tensor)

    @property
    def has_followed(self) -> bool:
        """Whether an entry has made each call of the pass."""
        return not self.differences

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_compiling():
            return function(*args, **kwargs) if kwargs else function(*args)
        entry = self.entries[self.next]
        known = entry[0]
        if known is function or known == function:  # Python makes `Tensor.shape`'s getter anew for each call
            self.next += 1
            act = entry[1]
            if act is None and not (kwargs and "out" in kwargs):
                return function(*args, **kwargs) if kwargs else function(*args)
            if act is None or act is WRITES or act is MAY_WRITE:
                given = kwargs or {}
                writes = act is WRITES or may_overwrite(function, args, given)
                if writes and not self.handles.may_write(function, args, given):
                    return self.unlike(function, types, args, given)
                return function(*args, **given)
            return (act.run or as_code(act))(self, function, types, args, kwargs or {})
        return self._other(function, types, args, kwargs or {})

    def _other(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not the expected one, or whose function has to be opened."""
        while (entry := self.entries[self.next]).asks:
            self.next += 1
        if entry.function == function:
            return self.__torch_function__(function, types, args, kwargs)
        if self.is_abandoned():
            return function(*args, **kwargs)
        row = row_of(function)
        if row.only_asks and PLAIN.issuperset(types):
            return function(*args, **kwargs)
        if entry.opened != function and not self.leaves and self._goes_on_elsewhere(function, args):
            return self.__torch_function__(function, types, args, kwargs)
        if row.is_opened and PLAIN.issuperset(types):
            if entry.opened == function:
                if entry.run is not None and (result := self._run(entry, args, kwargs)) is not NotImplemented:
                    return result
                self.next += 1
            _enter(self)
            try:
                return body(function)(*args, **kwargs)
            finally:
                _leave(self, None, None, None)
        return self.interpret(function, types, args, kwargs)

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the calls of an opened function, and return its result. NotImplemented: see `Opening.compiled`."""
        assert entry.opening is not None and entry.run is not None
        self.first = first = self.next
        result = entry.run(self, args, kwargs)
        if result is not NotImplemented and not self.leaves:
            self.next = first + entry.opening.end
        return result

    def inside(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the opened function that is running. `number`: offset of its entry from the function's."""
        number += self.first
        self.next = 0 if self.leaves else number
        return self.__torch_function__(self.script.entries[number].function, (), args, kwargs)  # type: ignore[arg-type]

    def _goes_on_elsewhere(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Find the entry of a call that is not the next one: calls have gone."""
        now = self.next
        if (place := self._place(function, args)) is None:
            near = self.entries[now + 1 : now + _NEAR]
            place = next((now + 1 + n for n, one in enumerate(near) if function in (one.function, one.opened)), None)
        if place is not None:
            self._go_to(place)
        return place is not None

    def _go_to(self, place: int) -> None:
        """Go on with another entry."""
        if place < self.next:
            self._note_difference()
        if not self.leaves:
            self.next = place

    def leave(self) -> None:
        """Record the rest of the pass."""
        self.leaves, self.entries, self.next = True, [END], 0

    def _place(self, function: Any, args: tuple[Any, ...]) -> int | None:
        """The number of the entry that has read the same parameter by the same function."""
        for one in args:
            if isinstance(one, nn.Parameter):
                reference, place = self.script.readers.get(id(one), (None, -1))
                is_it = reference is not None and reference() is one and self.entries[place].function == function
                return place if is_it else None
        return None

    def with_hooks(
        self, act: Act, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Slot | None
    ) -> tuple[Any, Packing]:
        """Run a call that saves what is dropped."""
        ours = self.handles
        ours.packing = packing = Packing()
        packing.act, packing.args, packing.kwargs, packing.slot = act, args, kwargs, own
        packing.takes, packing.inside = iter(act.packs or ()), {}
        try:
            push_hooks(ours.hook, unpack)  # inside the try, because Ctrl-C may come right after it
            return function(*args, **kwargs) if kwargs else function(*args), packing
        finally:
            pop_hooks()
            ours.packing = None

    def unlike(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that differs from its entry, before it has run: the next entry may be for it, or another one."""
        if self.leaves:
            return self.interpret(function, types, args, kwargs)
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

    def surprised(self, packing: Packing | None, result: Any) -> Any:
        """A call has not done what its entry expects."""
        self._note_difference()
        if packing is not None:
            packing.keep_all()
        return result

    def interpret(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the recorder make a call."""
        self._note_difference()
        if function == SETS_DATA:
            self.handles.forget(args[0])
        if may_overwrite(function, args, kwargs):
            self.handles.before_writing(overwritten(function, args, kwargs))
        outer, ours = self.hooks, saved_tensors_hooks(self.known.pack, unpack)
        if not (self.is_innermost() or (current_hooks() is None and hooks_are_allowed())):
            return super().__torch_function__(function, types, args, kwargs)
        self.hooks = ours
        try:
            ours.__enter__()  # inside the try, because Ctrl-C may come right after it
            return super().__torch_function__(function, types, args, kwargs)
        finally:
            ours.__exit__()
            self.hooks = outer

    def run_noted(self, *call: Any) -> Any:
        self.places.append(self.next if self.left_at is None else self.left_at)
        return super().run_noted(*call)

    def _note_difference(self) -> None:
        self.differences += 1
        if self.handles.known is None:
            policy = self.policy = None if self.make_policy is None else self.make_policy()
            if policy is not None:
                policy.plans, policy.left = [], calling_module()
            self.known = self.handles.known = Interpreter(self.handles, policy is not None)
            self.known.start, self.known.outside = self.start, self.outside
            if self.lesson is not None:
                self.lesson.outside = self.known.saved_outside
        if self.policy is not None and not self.leaves and _FEW * self.differences > self.script.learned:
            self.left_at = self.next
            self.leave()
