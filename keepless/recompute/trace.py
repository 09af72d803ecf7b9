"""The calls of a forward pass, the values that autograd saves in them, and what could be recomputed."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..inputs import tensors_in
from ..norms.bn_act import is_node
from ..saved import ByStorage, Gone, form_of, is_ordinary
from ..torch_internals import (
    address,
    at_end_of_backward,
    backward_runs,
    is_synchronised_norm,
    next_node_number,
    node_number,
    packed_by_function,
)
from .calls import Ran, RunningCall, argument_copied_by, nodes_of, state_bytes
from .functions import Row
from .rules import NotFollowed, Rule, is_mask_alike, may_overwrite
from .signs import unpacking_bytes
from .step import Event, Flag, Kind, Save, Step, busy, in_order
from .traced_values import TracedValues
from .values import Again

MUCH = 16  # tensors this many times smaller than a result may be kept for its recipe
FEW = 2**12  # entries: vectors below this size have no value
_COPIES_ARE_WORTH = 4  # an argument of at most this many times the bytes of its copy is kept instead of it
_COPYING = frozenset(["ToCopyBackward0", "CloneBackward0"])
_OF_CHECKPOINT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint, which first runs without gradients


class _Read(NamedTuple):
    """Stands for a value among a recipe's arguments."""

    value: int


class Trace:
    """Follows the calls of a forward pass, and notes its values as a recorder with a plan would treat them.

    A subclass notes allocations and operators. The calls come from `begins` and `ends`, the tensors that autograd saves
    from `saves`, and those that it reads from `reads`.

    Args:
        inputs: the network's inputs.
        made_here: the number of a tensor's memory; None if it existed before the step.
    """

    copy_parameters = False  # recipes get copies of parameters, because FSDP frees gathered parameters after each use

    def __init__(self, inputs: Sequence[Tensor], made_here: Callable[[Tensor], int | None]) -> None:
        self.made_here = made_here
        self.start = next_node_number()
        self.outside = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.memories: list[int] = []
        self.known = TracedValues(self.memory, self.memories)
        self.values = self.known.values
        self.saved: list[Save] = []
        self.events: list[tuple[Event, int] | Gone] = []
        self.calls: list[tuple[Any, int]] = []
        self.total = 0  # bytes of all results so far
        self.unseen = ""
        self.forward = -1  # number of events in the forward pass, once it has ended
        self.in_pass = False  # a backward pass is running
        self.costly: list[tuple[int, Ran]] = []  # values, and the calls that compute them
        self.call: RunningCall | None = None
        self._packed: dict[int, int] = {}  # id of what autograd holds -> number of the save
        self.open: list[Gone] = []  # saved tensors that autograd holds
        self.ran: list[Any] = []  # operators, as the subclass notes them
        self._outside: ByStorage[int] = ByStorage()  # memories that existed before the step

    def memory(self, tensor: Tensor) -> int:
        """The number of a tensor's memory."""
        if (number := self.made_here(tensor)) is not None:
            return number
        storage = tensor.untyped_storage()
        found = self._outside.get(storage)
        if found is None:
            found = self._outside.put(storage, len(self.memories))
            self.memories.append(0)
        return found

    def begins(self, function: Callable[..., Any], row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins that a recorder would record."""
        self.call = call = RunningCall(function, row, args, kwargs)
        call.event, call.operator = len(self.events), len(self.ran)
        if (row.writes or "out" in kwargs) and may_overwrite(function, args, kwargs):
            target = args[0] if args else None
            if isinstance(target, Tensor) and is_ordinary(target):
                call.target, call.version, call.before = target, target._version, self._value_of(target)

    def ends(self, result: Any) -> None:
        """The call has ended."""
        call, self.call = self.call, None
        assert call is not None, "a call that has begun"
        rule = call.row.again
        if rule is None or not isinstance(result, Tensor) or not result.requires_grad or not is_ordinary(result):
            self.note_made(call.arguments, result)
            return
        is_written = result is call.target and result._version == call.version + 1
        if not is_written and any(result is one for one in call.arguments):
            return
        self.call = call  # while it is asked what its recipe reads
        self._result(call, rule, result)
        self.call = None

    def passes(self, arguments: Sequence[Any], result: Any, needs_grad: bool, is_wrapped: bool) -> None:
        """A call has run that is not recorded, because gradients are off, or other hooks or a transform are on."""
        if needs_grad:
            self.unseen = "torch.vmap" if is_wrapped else "a checkpoint or saved-tensor hooks of its own"
        self.note_made(arguments, result)

    def note_made(self, arguments: Sequence[Any], result: Any) -> None:
        """Note the memory of results that a call has made without gradient, e.g. masks."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not tensor.requires_grad and tensor.dim() and is_ordinary(tensor):
                storage = tensor.untyped_storage()
                if not self.known.has_made(tensor):
                    given = filter(is_ordinary, tensors_in(arguments))
                    if all(self.is_made(a) for a in given if address(a.untyped_storage()) == address(storage)):
                        self.known.made[address(storage)] = weakref.ref(storage)

    def _result(self, call: RunningCall, rule: Rule, result: Tensor) -> None:
        """A call with a rule has a result: note the values that the call gives a plan to choose from."""
        number = len(self.calls)
        self.total += result.nbytes
        self.calls.append((call.function, self.total))
        given = {self.memory(a) for a in (*tensors_in(call.arguments), result) if is_ordinary(a)}
        call.inside = [
            one
            for one in call.inside
            if self.values[one].memory not in given and MUCH * self.values[one].bytes > result.nbytes
        ]
        again = self._followed_by(call, rule, result)
        mask = None
        if call.row.mask is not None and call.inside:
            mask = self._followed_by(call, call.row.mask, result)
        own = self.known.find(result)
        if own < 0:
            own = self.known.remember(result, self.known.add(Kind.KEPT, result))
        ran = Ran(call.event, len(self.events), call.operator, len(self.ran))
        is_whole = again is not None and bool(call.inside) and call.row.mask is None
        if again is None:
            self.values[own] = self.known.value(Kind.KEPT, result, (), number)
        elif not is_whole:
            self.values[own] = self.known.value(Kind.FREE, result, self._inputs(again), number, again)
            inside = sum(self.values[part].bytes for part in call.inside)
            self.costly.append((own, ran._replace(besides=-inside)))
        else:
            leader = call.inside[0]
            self.values[own] = self.known.value(Kind.FREE, result, self._inputs(again), number, leader=leader)
            self._inside(call, again, Flag.AGAIN, number)
            inside = sum(self.values[part].bytes for part in call.inside)
            self.costly.append((leader, ran._replace(besides=-inside)))
        if mask is not None:
            layout = sum(one.nbytes for one in tensors_in(call.arguments) if not is_mask_alike(one))
            self._inside(call, mask, Flag.MASK, number)
            self.costly.append((call.inside[0], ran._replace(end=ran.begin, besides=2 * result.nbytes + layout)))
        for save in call.replaceable:
            self._read_instead(save, own)
        base = result._base
        if base is not None and base.numel() == result.numel() and call.has_made(base):
            self.known.remember(base, own)  # other views of it follow

    def _inside(self, call: RunningCall, again: Again, flag: int, number: int) -> None:
        """Note that what a call has saved inside can be recomputed; the first of these values has the costs."""
        inputs, leader = self._inputs(again), call.inside[0]
        for part in call.inside:
            self.values[part] = self.values[part]._replace(
                kind=Kind.FREE, inputs=inputs, call=number, leader=leader, flag=flag
            )

    def _followed_by(self, call: RunningCall, rule: Rule, result: Tensor) -> Again | None:
        """How to repeat a call; None if its inputs are not kept, and may not be kept for it."""
        alone, room = 0, call.room(result, self.values)

        def find(tensor: Tensor, lend: bool = False) -> Any:
            nonlocal alone
            is_small = MUCH * tensor.untyped_storage().nbytes() <= room if is_ordinary(tensor) else False
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                if not is_small and self.copy_parameters:
                    raise NotFollowed
                return _Read(self.known.own_copy(tensor)) if is_small else tensor
            value = self._available(call, tensor, result, room)
            if value >= 0:
                return _Read(value)
            stays = tensor.requires_grad and tensor.is_leaf
            if tensor is result or not (is_small or lend or stays):
                raise NotFollowed
            is_copied = (
                is_small and tensor.is_leaf if tensor.requires_grad else is_small or not self.known.has_made(tensor)
            )
            if not stays:
                alone += tensor.untyped_storage().nbytes()
            if is_copied:
                return _Read(self.known.own_copy(tensor))
            return tensor if isinstance(tensor, nn.Parameter) else _Read(self.known.keep(tensor))

        try:
            again = rule(find, call.args, call.kwargs, result)
        except NotFollowed:
            return None
        if again.draws and (not call.asks("draws") or MUCH * state_bytes(result) > room):
            return None
        return again if alone <= room else None

    def _available(self, call: RunningCall, tensor: Tensor, result: Tensor, room: int) -> int:
        """The value of an argument, if a recipe may read it; otherwise -1."""
        if tensor is result:
            value = call.before if call.before >= 0 else self.known.find(tensor, overwrites=1)
            return value if value >= 0 and self.known.overwrite(value, tensor) else -1
        if not is_ordinary(tensor):
            raise NotFollowed
        value = self._value_of(tensor)
        if value < 0:
            is_large = MUCH * tensor.untyped_storage().nbytes() > room  # a copy of a mask for each call takes too much
            if self.is_made(tensor) or (is_large and self.known.has_made(tensor)):
                value = self.known.keep(tensor)
        return value

    def _inputs(self, again: Again) -> tuple[int, ...]:
        """The values among a recipe's arguments; a node's saved tensors are the objects that autograd holds."""
        numbers = [
            one.value if isinstance(one, _Read) else self.saved[self._packed[id(one)]].value
            for one in again.arguments
            if isinstance(one, _Read) or id(one) in self._packed
        ]
        return tuple(number for number in numbers if number >= 0)

    # Values

    def _value_of(self, tensor: Tensor) -> int:
        """The value of a tensor, if it is known or follows from others; otherwise -1."""
        value = self.known.find(tensor)
        if value < 0 and not tensor.is_leaf and self.is_made(tensor):
            value = self._followed(tensor)
            if value >= 0:
                self.known.remember(tensor, value)
        return value

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this forward pass."""
        node = tensor.grad_fn
        if node is None or node_number(node) < self.start or not is_ordinary(tensor):
            return False
        return address(tensor.untyped_storage()) not in self.outside

    def _followed(self, tensor: Tensor) -> int:
        """The value of a tensor that is no call's result, but follows from other values; otherwise -1."""
        node: Any = tensor.grad_fn
        name = type(node).__name__
        if tensor._is_view():
            base = tensor._base
            value = -1 if base is None or form_of(tensor, base) is None else self._value_of(base)
            return -1 if value < 0 else self.known.add(Kind.FOLLOWS, tensor, (value,))
        if is_node(node):
            if node.strategy.recompute_output and tensor._version == node.output_version:
                packed = packed_by_function(node)
                return self.known.add(Kind.FOLLOWS, tensor, self._values_of(packed[:1]))
        elif tensor._version == 0:
            if is_synchronised_norm(node):
                x, weight, mean, invstd, *_ = packed_by_function(node)
                if weight is not None and hasattr(node.next_functions[2][0], "variable"):
                    return self.known.add(Kind.FOLLOWS, tensor, self._values_of((x, mean, invstd)))
            elif self.call is not None and name in _COPYING | {"UnsafeViewBackward0"}:
                return self._of_copied_argument(tensor, node, self.call)
        return -1

    def _values_of(self, packed: Iterable[Any]) -> tuple[int, ...]:
        """The values of what autograd holds."""
        saves = [self._packed[id(one)] for one in packed if id(one) in self._packed]
        return tuple(self.saved[save].value for save in saves if self.saved[save].value >= 0)

    def _of_copied_argument(self, tensor: Tensor, node: Any, call: RunningCall) -> int:
        """A copy of an argument, made inside the running call: cast by autocast, or reshaped by matrix products."""
        is_reshaped = type(node).__name__ == "UnsafeViewBackward0"
        copying = node.next_functions[0][0] if is_reshaped else node
        argument = argument_copied_by(copying, call.arguments) if type(copying).__name__ in _COPYING else None
        if argument is None or argument.numel() != tensor.numel() or argument.device != tensor.device:
            return -1
        value = self._value_of(argument)
        if value >= 0 and self.known.unread_bytes(value) > _COPIES_ARE_WORTH * tensor.nbytes:
            value = -1
        if argument.dtype != tensor.dtype or is_reshaped:
            is_both = argument.dtype != tensor.dtype and is_reshaped
            return -1 if value < 0 or is_both else self.known.add(Kind.FOLLOWS, tensor, (value,))
        memory = self.memory(argument)
        if value < 0 or (self.known.readers[value] and self.known.reads_memory(value, memory)):
            return self.known.remember(argument, self.known.keep(tensor))
        self.values[value] = self.values[value]._replace(memory=self.memory(tensor))  # it is kept in its copy
        return value

    # Saved tensors

    def saves(self, packed: Any, tensor: Tensor) -> None:
        """Autograd saves a tensor, and holds `packed` in its place."""
        call = self.call
        if tensor.is_leaf:
            is_simple = (tensor.dim() < 2 and tensor.numel() < FEW) or isinstance(tensor, nn.Parameter)
        else:
            is_simple = isinstance(tensor._base, nn.Parameter)
        if is_simple:
            if not (tensor.requires_grad and call is not None):
                self._holds_for(packed, tensor)
            return
        if not is_ordinary(tensor):
            return
        is_form = call is not None and tensor.requires_grad and call.asks("reads_shape_only")
        value = self.known.add(Kind.FOLLOWS, tensor) if is_form else self._value_of(tensor)  # made empty for its reader
        if value < 0 and call is not None and call.row.narrow and not tensor.is_floating_point():
            value = self.known.narrowed(tensor, call.row.narrow(call.args, call.kwargs).itemsize)
        if value < 0:
            value = self._keep_with_base(tensor)
        save = Save(value, 0, self.memory(tensor), -1 if call is None else len(self.calls))
        if call is not None and call.asks("result_serves"):
            call.replaceable.append(len(self.saved))
        elif call is not None and call.row.positive is not None and not tensor._is_view():  # else the base is kept
            save = save._replace(signs=-(-tensor.numel() // 8), unpacking=unpacking_bytes(tensor))
        self._save(packed, tensor, save)

    def _save(self, packed: Any, tensor: Tensor, save: Save) -> None:
        number = len(self.saved)
        self.saved.append(save)
        self._packed[id(packed)] = number
        if save.value >= 0:
            self.known.sign_readers[save.value] += bool(save.signs)
            self.known.count_reader(save.value, 1)
        self.events.append((Event.SAVE, number))
        self.open.append(Gone(packed, self.events, (Event.RELEASE, number)))

    def _read_instead(self, save: int, value: int) -> None:
        """A save's reader gets another value."""
        self.known.count_reader(self.saved[save].value, -1)
        self.saved[save] = self.saved[save]._replace(value=value)
        self.known.count_reader(value, 1)

    def _keep_with_base(self, tensor: Tensor) -> int:
        """Keep a tensor; if it is a view of its whole base, keep the base, so that other views can be made from it."""
        base, call = tensor._base, self.call
        is_base = base is not None and base.numel() == tensor.numel() and self.is_made(base)
        kept = base if base is not None and is_base else tensor
        value = self.known.keep(kept)
        if call is not None and call.row.inside:
            call.inside.append(value)
        if not is_base:
            return value
        found = self._value_of(tensor)
        return found if found >= 0 else self.known.keep(tensor)  # a view that cannot be made again, such as a conjugate

    def _holds_for(self, packed: Any, tensor: Tensor) -> None:
        """Autograd saves a tensor that has no value, such as the statistics of a norm."""
        if is_ordinary(tensor):
            memory = self.memory(tensor)
            self.events.append((Event.HOLD, memory))
            self.open.append(Gone(packed, self.events, (Event.LET, memory)))

    def reads(self, packed: Any) -> None:
        """The backward pass reads what autograd holds."""
        number = self._packed.get(id(packed))
        if number is not None and backward_runs():
            if not self.in_pass:
                self.in_pass = True
                at_end_of_backward(self._backward_ends)
            self.events.append((Event.READ, number))

    def _backward_ends(self) -> None:
        self.in_pass = False
        self.events.append((Event.PASS, 0))

    def forward_ends(self, outputs: Iterable[Tensor]) -> None:
        """The forward pass has ended with these outputs."""
        self.forward = len(self.events)
        self.known.clear()
        if any(type(node).__name__ == _OF_CHECKPOINT for node in nodes_of(outputs)):
            self.unseen = "a checkpoint of its own"

    def happened(self) -> list[tuple[Event, int]]:
        """The events so far."""
        return [one.event if isinstance(one, Gone) else one for one in self.events]

    def step_of(
        self, events: list[tuple[Event, int]], seconds: Sequence[float], operations: Sequence[int], host: float
    ) -> Step:
        """The step with these events, whose operators took these seconds; `host`: more seconds of a repeated call."""
        for number, ran in self.costly:
            self.values[number] = self.values[number]._replace(
                seconds=sum(seconds[ran.first : ran.last]) + host,
                operations=sum(operations[ran.first : ran.last]),
                busy=max(0, busy(events[ran.begin : ran.end], self.memories) + ran.besides),
            )
        values = [one._replace(seconds=host) if one.kind == Kind.FOLLOWS else one for one in self.values]
        values, saved = in_order(values, self.saved)
        found = Step(values, self.memories, saved, events, self.forward, self.calls, self.unseen)
        return found._replace(seconds=sum(seconds), operations=sum(operations))
