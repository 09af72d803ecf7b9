"""Trace one training step: the values that its backward pass reads, and every allocation and release."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import tensors_in
from ..norms.bn_act import is_fused, is_node
from ..saved import ByStorage, Gone, Kept, is_ordinary
from ..torch_internals import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    at_end_of_backward,
    backward_runs,
    node_number,
    unpack,
)
from .costs import (
    MeasuredCall,
    backward_temporaries,
    call_of,
    computing_device,
    estimated_seconds,
    forward_seconds,
    forward_temporaries,
    operations_of,
    seconds_of,
)
from .functions import Call
from .rules import is_mask_alike
from .signs import ShapeOnly, unpacking_bytes
from .step import Costs, Event, Flag, Kind, Save, Step, StepValue, in_order
from .sums import Edges, Sums, edges_of
from .values import Again, Recipe, Saved, Value

Gradients = Sequence[Tensor | None]

_OF_WRITTEN_VIEW = "CopySlices"  # the node of a call that has written over a view, e.g. over an instance norm's result
_OF_CHECKPOINT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint, which first runs without gradients
_SMALL = 2**12  # bytes: a call with smaller arguments is not measured; its event stays, as in larger steps


class Progress(Enum):
    """State of a traced step. DROPPED: its graph was freed without a backward pass, or the backward pass failed."""

    RUNS = "runs"
    ENDED = "ended"
    DROPPED = "dropped"


class _Busy(NamedTuple):
    """A call whose temporary bytes are measured once the step has ended."""

    call: MeasuredCall
    event: int  # number of its BUSY event
    value: int  # number of the value that this call computes; -1 if unknown


class StepTrace:
    """Watches a forward pass through a `Recording`, and the backward pass that follows.

    Args:
        measures: measure calls on other tensors once the step has ended. Otherwise times are estimated, and temporary
            memory of calls is not counted.
    """

    def __init__(self, measures: bool = True) -> None:
        self.measures = measures
        self.values: list[StepValue] = []
        self.memories: list[int] = []
        self.saved: list[Save] = []
        self.events: list[tuple[Event, int] | Gone] = []
        self.forward = -1  # number of events in the forward pass, once it has ended
        self.calls: list[Any] = []
        self.unseen = ""
        self.ran = False  # a backward pass has run, at least through a part of the graph
        self.in_pass = False  # a backward pass is running, or was aborted by an error
        self._numbers: ByStorage[int] = ByStorage()  # numbers of memories
        self._watched: dict[int, Gone] = {}  # by id
        self._open: list[Gone] = []  # saved tensors that autograd holds
        self._vectors: list[Gone] = []  # the same, for tensors without a value
        self._unnumbered: list[tuple[Saved, int, int]] = []  # saved by the running call
        self._handles: list[Any] = []
        self._sums = Sums(self.events, self.memories)
        self._copies: list[int] = []  # numbers of the memories that running nodes hold
        self.seconds = 0.0  # of the last call
        self._began = 0  # number of the last call's first event
        self._backward: dict[int, MeasuredCall] = {}  # by the number of the call's node
        # To be measured after the step: calls, and the events of their nodes with the strides of the gradients.
        self._busy: list[_Busy] = []
        self._busy_backward: list[tuple[int, MeasuredCall, tuple[int, ...], int]] = []  # the last: additional bytes
        self._drawn: list[tuple[MeasuredCall, int]] = []  # with the number of the mask
        self._without_rules: dict[int, MeasuredCall] = {}  # by the number of a result's node

    def memory(self, tensor: Tensor, *, outside: bool = False) -> int:
        """The number of a tensor's memory. `outside`: if it is new here, it existed before the step."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers.put(storage, len(self.memories))
            self.memories.append(0 if outside else storage.nbytes())
        return number

    def holds(self, tensor: Tensor) -> None:
        """Record that the program holds a reference to this tensor until it is freed."""
        watched = self._watched.get(id(tensor))
        if is_ordinary(tensor) and (watched is None or watched() is not tensor):
            memory = self.memory(tensor)
            self.events.append((Event.HOLD, memory))
            self._watched[id(tensor)] = Gone(tensor, self.events, (Event.LET, memory))

    def holds_for(self, kept: Kept, tensor: Tensor) -> None:
        """Autograd saves a tensor that has no value, such as the statistics of a norm."""
        memory = self.memory(tensor)
        self.events.append((Event.HOLD, memory))
        self._vectors.append(Gone(kept, self.events, (Event.LET, memory)))

    def keeps(self, value: Value, tensor: Tensor) -> None:
        value.number = self._add(Kind.KEPT, tensor)

    def follows(self, value: Value, tensor: Tensor) -> None:
        """A value has a recipe that no call gave it: see `KnownValues.value_of`."""
        assert isinstance(value.source, Recipe)
        value.number = self._add(Kind.FOLLOWS, tensor, _numbers(value.source.inputs))

    def result(self, call: Call, result: Tensor, again: Again | None, mask: Again | None, number: int) -> int:
        """Note the result of a call with a rule; return the number of its value.

        `again`: how to repeat the call, which also restores what it has saved inside, unless `mask` does that.
        """
        is_whole = again is not None and bool(call.inside) and call.row.mask is None
        leader = call.inside[0].value.number if is_whole else -1
        costs = self._costs(call, result, leader if is_whole else len(self.values))
        if again is None:
            own = self._add(Kind.KEPT, result, (), costs, number)
        elif not is_whole:
            own = self._add(Kind.FREE, result, _numbers(again.arguments), costs, number, again)
        else:
            own = self._add(Kind.FREE, result, _numbers(again.arguments), Costs(), number, leader=leader)
            costs = costs._replace(busy=costs.busy + result.nbytes)
            self._inside(call, again, costs, Flag.AGAIN, number)
        if mask is not None:
            layout = sum(one.nbytes for one in tensors_in(call.arguments) if not is_mask_alike(one))
            self._inside(call, mask, Costs(costs.seconds, 2 * result.nbytes + layout), Flag.MASK, number)
            drawn = call_of(call.function, call.args, call.kwargs, lists=False)
            if self.measures and drawn is not None:
                self._drawn.append((drawn, call.inside[0].value.number))
        return own

    def _inside(self, call: Call, again: Again, costs: Costs, flag: int, number: int) -> None:
        """Note that what a call has saved inside can be recomputed; the first of these values has the costs."""
        inputs, leader = _numbers(again.arguments), call.inside[0].value.number
        for part in call.inside:
            one = self.values[part.value.number]._replace(
                kind=Kind.FREE, inputs=inputs, call=number, leader=leader, flag=flag, **costs._asdict()
            )
            self.values[part.value.number], costs = one, Costs()

    def _add(
        self,
        kind: Kind,
        tensor: Tensor,
        inputs: tuple[int, ...] = (),
        costs: Costs = Costs(),  # noqa: B008  # immutable
        call: int = -1,
        again: Again | None = None,
        leader: int = -1,
    ) -> int:
        """Note a value, and return its number. `inputs`: what its recipe reads. `again`: how to repeat its call."""
        memory = self.memory(tensor)
        sharing = (i for i in inputs if self.values[i].memory == memory and self.values[i].kind != Kind.OVERWRITTEN)
        alias = next(sharing, -1)
        flags = (False, False) if again is None else (again.fresh, again.can_overwrite and bool(inputs))
        size = 0 if alias >= 0 else tensor.numel() * tensor.itemsize
        self.values.append(StepValue(kind, memory, size, inputs, alias, call, *costs, *flags, leader=leader))
        return len(self.values) - 1

    def moves(self, value: Value, copy: Tensor) -> None:
        """A value is kept in a copy."""
        if value.number >= 0:
            self.values[value.number] = self.values[value.number]._replace(memory=self.memory(copy))

    def overwrites(self, value: Value, tensor: Tensor) -> bool:
        """A call has overwritten a tensor of this value. Returns whether the value can still be recomputed."""
        if value.number < 0:
            return False
        memory = self.memory(tensor)
        pending, overwritten = [value.number], []
        while pending:
            number = pending.pop()
            one = self.values[number]
            if one.kind == Kind.KEPT and one.memory == memory:
                return False
            if one.memory == memory or one.kind == Kind.FOLLOWS:
                pending += one.inputs
            if one.memory == memory and one.kind == Kind.FREE:
                overwritten.append(number)
        for number in overwritten:
            self.values[number] = self.values[number]._replace(kind=Kind.OVERWRITTEN)
        return True

    def saves(self, saved: Saved | ShapeOnly, tensor: Tensor, in_call: bool) -> None:
        """Autograd saves a tensor. In a call, the number of its value is known only at the end."""
        number = len(self.saved)
        self.saved.append(Save(-1, 0, self.memory(tensor), len(self.calls) if in_call else -1))
        if isinstance(saved, Saved):
            saved.number = number
            signs = (-(-tensor.numel() // 8), unpacking_bytes(tensor)) if saved.reads_signs else (0, 0)
            self._unnumbered.append((saved, *signs))
        self.events.append((Event.SAVE, number))
        self._open.append(Gone(saved, self.events, (Event.RELEASE, number)))
        if not in_call:
            self._number_saved()

    def ended(self, result: Any) -> None:
        """A call has ended, and its result has a value."""
        for tensor in filter(is_ordinary, tensors_in(result)):
            self.holds(tensor)
        self._number_saved()

    def _number_saved(self) -> None:
        for saved, signs, unpacking in self._unnumbered:
            entry = self.saved[saved.number]
            self.saved[saved.number] = entry._replace(value=saved.value.number, signs=signs, unpacking=unpacking)
        self._unnumbered.clear()

    def forward_ends(self) -> None:
        self.forward = len(self.events)

    def unpack(self, saved: Any) -> Tensor:
        """The unpack hook, which autograd calls in the backward pass."""
        if isinstance(saved, Saved) and backward_runs():
            self._backward_begins()
            self.events.append((Event.READ, saved.number))
        return unpack(saved)

    def run(self, call: Call, is_made: Callable[[Tensor], bool]) -> Any:
        """Run a call, and measure its time."""
        for tensor in filter(is_ordinary, tensors_in(call.arguments)):
            if is_made(tensor):  # made in this pass, but not by a recorded call
                self.holds(tensor)
            else:
                self.memory(tensor, outside=True)
        self._began, device = len(self.events), computing_device(tensors_in(call.arguments))
        result, self.seconds = seconds_of(lambda: call.function(*call.args, **call.kwargs), device)
        if call.saves and call.row.again is None:
            self._without_rule(call, result)
        return result

    def _without_rule(self, call: Call, result: Any) -> None:
        """Note a PyTorch call without a rule, such as an LSTM: its temporary memory is measured later."""
        results = [one for one in tensors_in(result) if one.grad_fn is not None]
        if not results or not isinstance(call.function, (BuiltinFunctionType, MethodDescriptorType)):
            return
        measured = self._measured_call(call, results[0], lists=True)
        if measured is not None and measured.size >= _SMALL:
            self.events.insert(self._began, (Event.BUSY, sum(one.nbytes for one in results)))
            self._busy.append(_Busy(measured, self._began, -1))
            self._without_rules[node_number(results[0].grad_fn)] = measured

    def _costs(self, call: Call, result: Tensor, value: int) -> Costs:
        """The costs of repeating the call that has just run. `value`: number of the value that it computed."""
        seconds, function = self.seconds, call.function
        measured = self._measured_call(call, result)
        if measured is not None:
            event, extra = len(self.events), 0
            if call.inside:  # the events of its nodes cover the rest
                event, extra = self._began, result.nbytes
            if not call.inside or is_node(result.grad_fn):
                self._backward[node_number(result.grad_fn)] = measured
            self.events.insert(event, (Event.BUSY, extra))
            self._busy.append(_Busy(measured, event, value))
        if isinstance(result, FakeTensor) or is_fused(result.grad_fn, call.args):  # fused: it has just compiled
            seconds = estimated_seconds(function, call.arguments, result)
        return Costs(seconds, 0, operations_of(function, call.arguments, result))

    def _measured_call(self, call: Call, result: Tensor, lists: bool = False) -> MeasuredCall | None:
        """The call, if it can be measured on other tensors: it draws no numbers, overwrites and compiles nothing.

        No custom operator is: its kernel may read outside its tensors where ones are no indices, as RoI pooling does.
        `lists`: the arguments may be lists of tensors.
        """
        tensors = [one for one in call.arguments if isinstance(one, Tensor)]
        if (not self.measures and isinstance(result, FakeTensor)) or is_fused(result.grad_fn, call.args):
            return None
        if "dropout" in getattr(call.function, "__name__", "") or any(one is result for one in tensors):
            return None
        if isinstance(call.function, (OpOverload, OpOverloadPacket)) or not all(map(is_ordinary, tensors)):
            return None
        return call_of(call.function, call.args, call.kwargs, lists)

    def watch_backward(self, outputs: Iterable[Tensor], start: int) -> None:
        """The forward pass has ended. `start`: sequence number of its first node."""
        pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            call = self._backward.get(node_number(node))
            inside = self._without_rules.get(node_number(node))
            is_copying = type(node).__name__ == _OF_WRITTEN_VIEW
            if type(node).__name__ == _OF_CHECKPOINT:
                self.unseen = "a checkpoint of its own"
            self._handles.append(node.register_prehook(partial(self._before, node_number(node), inside, is_copying)))
            self._handles.append(node.register_hook(partial(self._after, edges_of(node), call, is_copying)))
            for following, _ in node.next_functions:
                if following is None or following in seen or hasattr(following, "variable"):
                    continue
                if node_number(following) >= start:
                    seen.add(following)
                    pending.append(following)

    def _before(self, number: int, call: MeasuredCall | None, is_copying: bool, gradients: Gradients) -> None:
        """A node of the backward pass is about to run; with `call`, the first node of that call.

        `is_copying`: the node is an `_OF_WRITTEN_VIEW`, which holds the view's gradient before and after, while another
        node runs inside.
        """
        self._sums.run(number)
        self._gradients(gradients)
        if is_copying:
            self._copies.append(len(self.memories))
            self.memories.append(0 if gradients[0] is None else 2 * gradients[0].nbytes)
            self.events.append((Event.HOLD, self._copies[-1]))
        if call is not None and gradients[0] is not None:
            self._busy_backward.append((len(self.events), call, gradients[0].stride(), call.trained))
            self.events.append((Event.BUSY, 0))

    def _after(
        self, edges: Edges, call: MeasuredCall | None, is_copying: bool, found: Gradients, given: Gradients
    ) -> None:
        """A node of the backward pass has run."""
        self._gradients(found)
        if is_copying:
            self.events.append((Event.LET, self._copies.pop()))
        if call is not None and given and given[0] is not None:
            self._busy_backward.append((len(self.events), call, given[0].stride(), 0))
            self.events.append((Event.BUSY, 0))
        self.events.append((Event.DONE, 0))
        self._sums.add(edges, found)

    def _gradients(self, gradients: Gradients) -> None:
        """The backward pass holds these tensors."""
        self._backward_begins()
        for gradient in gradients:
            if gradient is not None:
                self.holds(gradient)

    def _backward_begins(self) -> None:
        if not self.in_pass:
            self.ran = self.in_pass = True
            at_end_of_backward(self._backward_ends)  # not called after an error

    def _backward_ends(self) -> None:
        self.in_pass = False
        self._sums.end()
        self.events.append((Event.PASS, 0))

    def progress(self) -> Progress:
        """The state of the step."""
        is_released = self.forward >= 0 and not any(gone() is not None for gone in self._open)
        if self.ran and not is_released and backward_runs():  # a reentrant checkpoint runs a backward pass inside
            return Progress.RUNS
        if self.ran:
            return Progress.DROPPED if self.in_pass and not backward_runs() else Progress.ENDED
        return Progress.DROPPED if is_released else Progress.RUNS

    def step(self) -> Step:
        """The step, once it has ended."""
        for handle in self._handles:
            handle.remove()
        events = [one.event if isinstance(one, Gone) else one for one in self.events]
        for busy in self._busy:
            if busy.call.size < _SMALL:
                continue
            taken = forward_temporaries(busy.call) or 0
            _, extra = events[busy.event]
            events[busy.event] = Event.BUSY, extra + taken
            if busy.value >= 0:
                value = self.values[busy.value]
                seconds = forward_seconds(busy.call) if self.measures else None
                seconds = value.seconds if seconds is None else seconds
                self.values[busy.value] = value._replace(busy=value.busy + taken, seconds=seconds)
        for event, call, stride, besides in self._busy_backward:
            if call.size >= _SMALL:
                events[event] = Event.BUSY, besides + (backward_temporaries(call, stride, besides > 0) or 0)
        for drawn, number in self._drawn:
            self.values[number] = self.values[number]._replace(seconds=forward_seconds(drawn) or 0.0)
        values, saved = in_order(self.values, self.saved)
        return Step(values, self.memories, saved, events, self.forward, self.calls, self.unseen)


def _numbers(arguments: Iterable[object]) -> tuple[int, ...]:
    """The values among a recipe's arguments."""
    return tuple(one.number for one in arguments if isinstance(one, Value) and one.number >= 0)
