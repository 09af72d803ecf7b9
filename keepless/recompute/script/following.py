"""Run a learned step: compare each call with its script, and hand over to the recorder where one differs."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...saved import PLAIN, is_ordinary
from ...torch_internals import (
    address,
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
from ..recorder.plan import ByPlan
from ..recorder.recording import Recording
from ..table.functions import body, row_of
from .code import as_code
from .handles import Handles, Packing, has_signs
from .script import END, WRITES, Act, Entry, Keep, Script, Slot

_is_compiling = torch.compiler.is_dynamo_compiling
_enter: Any = TorchFunctionMode.__enter__
_leave: Any = TorchFunctionMode.__exit__


class Following(Recording):
    """Context of a forward pass that follows a script.

    Args:
        script: of an earlier pass with inputs of this form.
        others: scripts for the same form of inputs, for passes that take another branch.
        make_policy: makes the policy of the recorder, if it has to take over. None: it needs none.
        inputs, frame: see `Recording`.
    """

    def __init__(
        self,
        script: Script,
        others: Sequence[Script],
        make_policy: Callable[[], ByPlan] | None,
        *,
        inputs: Sequence[Tensor] = (),
        frame: Any = None,
    ):
        super().__init__(None, inputs=inputs, frame=frame)
        self.script: Script | None = script
        self.others, self.make_policy = others, make_policy
        self.entries = script.entries
        self.next = 0  # number of the next entry
        self.handles = Handles()
        self.stream = 0
        self.sees_rest = False  # of the calls of an opened function: the recorder has taken over between them
        self.waits = False  # the recorder has taken over, but cannot set its hooks yet

    def __enter__(self) -> "Following":
        self.outside = {address(one.untyped_storage()) for one in self.inputs if is_ordinary(one)}
        cuda = next((one for one in self.inputs if one.is_cuda), None)
        self.stream = 0 if cuda is None or raw_stream is None else raw_stream(cuda.device.index)
        self.inputs, self.start = (), next_node_number()
        if self.script is not None and self.script.has_hooks:
            self.hooks = saved_tensors_hooks(self._saved_outside, unpack)
            self.hooks.__enter__()
        _enter(self)
        return self

    def forget(self) -> None:
        if self.script is None:
            super().forget()
        else:
            self.kept, self.script, self.frame = self.script.kept, None, None
            self.handles.clear()

    def _saved_outside(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor, where `Handles.pack` does not decide it."""
        with without_function_modes():
            return self.handles.held(tensor)

    @property
    def has_followed(self) -> bool:
        """Whether the pass has made all calls of the script, and no other one."""
        return self.script is not None and all(one.asks or one is END for one in self.entries[self.next :])

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_compiling():
            return function(*args, **kwargs) if kwargs else function(*args)
        if self.script is not None:
            entry = self.entries[self.next]
            known = entry[0]
            if known is function or known == function:  # Python makes `Tensor.shape`'s getter anew for each call
                self.next += 1
                act = entry[1]
                if act is None or (act is WRITES and self.handles.may_write(function, args, kwargs or {})):
                    return function(*args, **kwargs) if kwargs else function(*args)
                if act is WRITES:
                    return self.differs(function, types, args, kwargs or {})
                return (act.run or as_code(act))(self, function, types, args, kwargs or {})
            return self._other(function, types, args, kwargs or {})
        if self.waits and not self.abandoned:
            self._start_if_allowed()
            if self.waits:
                return function(*args, **kwargs) if kwargs else function(*args)
        return super().__torch_function__(function, types, args, kwargs)

    def _other(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not the expected one, or whose function has to be opened."""
        while (entry := self.entries[self.next]).asks:
            self.next += 1
        if entry.function == function:
            return self.__torch_function__(function, types, args, kwargs)
        row = row_of(function)
        if row.only_asks and PLAIN.issuperset(types):
            return function(*args, **kwargs)
        if entry.opened == function and PLAIN.issuperset(types):
            if entry.run is not None and (result := self._run(entry, args, kwargs)) is not NotImplemented:
                return result
            self.next += 1
            _enter(self)
            try:
                return body(function)(*args, **kwargs)
            finally:
                _leave(self, None, None, None)
        if self._branches(function):
            return self._other(function, types, args, kwargs)
        self.hand_over()
        return super().__torch_function__(function, types, args, kwargs)

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the calls of an opened function, and return its result. NotImplemented: see `Opening.compiled`."""
        assert entry.opening is not None and entry.run is not None
        try:
            result = entry.run(self, args, kwargs)
        finally:
            if self.sees_rest:
                self.sees_rest = False
                _leave(self, None, None, None)
        if self.script is not None and result is not NotImplemented:
            self.next = entry.opening.end
        return result

    def inside(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call of the entry with this number, which is inside an opened function."""
        function: Any = self.entries[number].function
        if self.script is None:  # the recorder sees the call
            return function(*args, **kwargs)
        self.next = number
        result = self.__torch_function__(function, (), args, kwargs)
        if self.script is None:  # the recorder has taken over
            _enter(self)
            self.sees_rest = True
        return result

    def _branches(self, function: Any) -> bool:
        """Go on with another script that has the same calls so far, and then this function."""
        now = self.next
        assert self.script is not None
        for other in self.others:
            functions = other.functions
            if other is not self.script and now < len(functions) and functions[now] == function:
                if functions[:now] == self.script.functions[:now]:
                    self.script, self.entries = other, other.entries
                    return True
        return False

    def with_hooks(
        self, act: Act, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Slot | None
    ) -> tuple[Any, Packing]:
        """Run a call that saves what is dropped."""
        ours = self.handles
        ours.packing = packing = Packing()
        packing.act, packing.args, packing.kwargs, packing.slot = act, args, kwargs, own
        packing.takes = iter(act.packs or ())
        try:
            push_hooks(ours.hook, unpack)  # inside the try, because Ctrl-C may come right after it
            return function(*args, **kwargs) if kwargs else function(*args), packing
        finally:
            pop_hooks()
            ours.packing = None

    def differs(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that differs from the script, before it has run."""
        self.next -= 1
        self.hand_over()
        return super().__torch_function__(function, types, args, kwargs)

    def surprised(self, packing: Packing | None, result: Any) -> Any:
        """A call has not done what the script expects."""
        if packing is not None:
            packing.keep_all()
        self.hand_over()
        return result

    def hand_over(self) -> None:
        """Let the recorder go on with the rest of the pass."""
        script, found, saved = self.script, self.handles.found, self.handles.slots
        assert script is not None
        if self.is_abandoned():
            return
        policy = None if self.make_policy is None else self.make_policy()
        if policy is not None and script.plan is not None and self.next:
            last = self.entries[self.next - 1]
            policy.catch_up([one for one, _ in script.plan.calls[: last.calls + 1]], last.total)
        self._start_recorder(policy)
        _tell(self.known, found, saved)

    def _start_recorder(self, policy: ByPlan | None) -> None:
        self.script, self.policy = None, policy
        self.known = KnownValues((), None, False, policy is not None)
        self.known.start, self.known.outside = self.start, self.outside
        self.handles.clear()
        self.waits = True
        self._start_if_allowed()

    def _start_if_allowed(self) -> None:
        """Set our hooks, unless the program has set others inside this pass: then once these have gone."""
        if self.is_innermost() or (current_hooks() is None and hooks_are_allowed()):
            self.waits = False
            self._end_hooks()
            self._start_hooks()


def _tell(known: KnownValues, found: dict[int, Any], saved: Any) -> None:
    """Tell the recorder the values that a script knows. `saved`: see `Handles.slots`."""
    slots = {one for _, _, one in found.values() if type(one) is Slot}.union(slot for _, slot in saved)
    for reference, slot in saved:
        storage = reference()
        slot.memory = None if storage is None else known.memory_of(storage)
    kept: dict[int, Value] = {}  # by id of the handle
    for reference, version, handle in found.values():
        tensor = reference()
        if tensor is None or not is_ordinary(tensor) or tensor._version != version:
            continue
        if type(handle) is Keep:
            kept[id(handle)] = known.find(tensor) or known.keep(tensor)
        elif known.find(tensor) is None and not has_signs(handle):
            known.remember(tensor, Value(Recipe(Again(handle.look, ()), tensor)))
    for slot in slots:
        holder = slot if slot.group is None else slot.group
        values = [kept.get(id(one)) for one in holder.arguments]
        if any(values):
            # The recorder copies a value that a recipe reads, if the program overwrites it, and does not keep its signs
            # alone: a slot reads it for as long as the slot exists.
            pairs = zip(holder.arguments, values, strict=True)
            holder.arguments = [value or one for one, value in pairs]
            for value in filter(None, values):
                value.recipes.append(ref(holder))
                value.count(1)
