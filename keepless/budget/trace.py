"""Trace one training step: the values that its backward pass reads, and every allocation and release."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..inputs import tensors_in
from ..recompute.rules import FOLLOWED, NotFollowed, Rule
from ..recompute.values import Again, Call, Recipe, Saved, ShapeOnly, Value
from ..saved import Kept, is_ordinary
from ..torch_internals import FakeTensor, StorageWeakRef, address, backward_runs, node_number, unpack
from .costs import MeasuredCall, call_of, estimated_seconds, operations_of, seconds_again, seconds_of
from .estimates import Estimates
from .step import Costs, Event, Kind, Save, Step, StepValue

_SMALL = 2**12  # bytes of a call's arguments below which nothing is measured


class Progress(Enum):
    """How far a traced step has come. DROPPED: the graph was freed without a backward pass."""

    RUNS = "runs"
    ENDED = "ended"
    DROPPED = "dropped"


class StepTrace:
    """Sees a recorded forward pass (it is the `Trace` of a `Recording`), and the backward pass that follows.

    Args:
        estimates: of what calls take, used when the step has ended. Without them, what is computed again is timed at
            once, on top of what the step holds; and calls on fake tensors take no temporary bytes.
    """

    def __init__(self, estimates: Estimates | None = None) -> None:
        self.estimates = estimates
        self.values: list[StepValue] = []
        self.memories: list[int] = []
        self.saved: list[Save] = []
        self.events: list[tuple[Event, int]] = []
        self.forward = -1  # number of events in the forward pass, once it has ended
        self.calls: list[Any] = []
        self.ran = False  # the backward pass, at least through a part of the graph
        self.released = 0
        self._is_fake = False  # the step runs on fake tensors
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # of memories, by address
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._unnumbered: list[tuple[Saved, int]] = []  # saved by the call that is running
        self._handles: list[Any] = []
        self.seconds = 0.0  # of the call that ran last
        self._measured: dict[Any, float] = {}  # seconds of a recipe, by function, shape and dtype
        self._backward: dict[int, MeasuredCall] = {}  # by the number of the node that it made
        # To be measured after the step: numbers of values and events; events, with the strides of the gradients.
        self._busy: list[tuple[int, int, MeasuredCall]] = []
        self._busy_backward: list[tuple[int, MeasuredCall, tuple[int, ...]]] = []

    def memory(self, tensor: Tensor, *, outside: bool = False) -> int:
        """The number of a tensor's memory. `outside`: if it is not known, it was there before."""
        storage = tensor.untyped_storage()
        entry = self._numbers.get(address(storage))
        if entry is None:
            entry = self._numbers[address(storage)] = (StorageWeakRef(storage), len(self.memories))
            self.memories.append(0 if outside else storage.nbytes())
        return entry[1]

    def holds(self, tensor: Tensor) -> None:
        """Record that the program holds a reference to this tensor until it is freed."""
        if is_ordinary(tensor) and id(tensor) not in self._watched:
            memory = self.memory(tensor)
            self.events.append((Event.HOLD, memory))
            self._watched[id(tensor)] = weakref.ref(tensor, partial(self._lets, id(tensor), memory))

    def _lets(self, key: int, memory: int, _: object) -> None:
        del self._watched[key]
        self.events.append((Event.LET, memory))

    def keeps(self, value: Value, tensor: Tensor) -> None:
        value.number = self._add(Kind.KEPT, tensor)

    def follows(self, value: Value, tensor: Tensor) -> None:
        """A value has a recipe that no call gave it: see `by_node`."""
        assert isinstance(value.source, Recipe)
        value.number = self._add(Kind.FOLLOWS, tensor, value.source.inputs())

    def result(self, call: Call, rule: Rule, result: Tensor, again: Again | None, number: int) -> int:
        """Note the result of a call with a rule; return the number of its value. `again`: how to repeat the call."""
        costs = self._costs(call, rule, result)
        kind, inputs = (Kind.KEPT, ()) if again is None else (Kind.FREE, again.arguments)
        return self._add(kind, result, inputs, costs, number, again)

    def _add(
        self,
        kind: Kind,
        tensor: Tensor,
        inputs: Iterable[object] = (),
        costs: Costs = Costs(0.0, 0, 0),  # noqa: B008  # immutable
        call: int = -1,
        again: Again | None = None,
    ) -> int:
        """Note a value, and return its number. `inputs`: arguments of its recipe. `again`: of a call's result."""
        numbers = tuple(one.number for one in inputs if isinstance(one, Value) and one.number >= 0)
        memory = self.memory(tensor)
        sharing = (i for i in numbers if self.values[i].memory == memory and self.values[i].kind != Kind.OVERWRITTEN)
        alias = next(sharing, -1)
        flags = (False, False) if again is None else (again.fresh, again.can_overwrite and bool(numbers))
        size = 0 if alias >= 0 else tensor.numel() * tensor.itemsize
        self.values.append(StepValue(kind, memory, size, numbers, alias, call, *costs, *flags))
        return len(self.values) - 1

    def moves(self, value: Value, copy: Tensor) -> None:
        """A value is kept in a copy."""
        if value.number >= 0:
            self.values[value.number] = self.values[value.number]._replace(memory=self.memory(copy))

    def overwrites(self, value: Value, tensor: Tensor) -> bool:
        """A call has overwritten a tensor of this value. Returns whether the value can still be computed again."""
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
        self.saved.append(Save(-1, 0, self.memory(tensor)))
        if isinstance(saved, Saved):
            saved.number = number
            self._unnumbered.append((saved, -(-tensor.numel() // 8) if saved.reads_signs else 0))
        self.events.append((Event.SAVE, number))
        self._watched[id(saved)] = weakref.ref(saved, partial(self._releases, id(saved), number))
        if not in_call:
            self._number_saved()

    def ended(self, result: Any) -> None:
        """A call has ended, and its result has a value."""
        for tensor in filter(is_ordinary, tensors_in(result)):
            self.holds(tensor)
        self._number_saved()

    def _number_saved(self) -> None:
        for saved, signs in self._unnumbered:
            self.saved[saved.number] = self.saved[saved.number]._replace(value=saved.value.number, signs=signs)
        self._unnumbered.clear()

    def forward_ends(self) -> None:
        self.forward = len(self.events)

    def _releases(self, key: int, number: int, _: object) -> None:
        del self._watched[key]
        self.released += 1
        self.events.append((Event.RELEASE, number))

    def unpack(self, saved: Any) -> Tensor:
        """The unpack hook, which autograd calls in the backward pass."""
        if isinstance(saved, Saved) and backward_runs():
            self.ran = True
            self.events.append((Event.READ, saved.number))
        return unpack(saved)

    def run(self, call: Call, is_made: Callable[[Tensor], bool]) -> Any:
        """Run a call, and measure its time."""
        for tensor in filter(is_ordinary, tensors_in(call.arguments)):
            if is_made(tensor):  # by code that calls no function
                self.holds(tensor)
            else:
                self.memory(tensor, outside=True)
        given = next((one for one in call.args if isinstance(one, Tensor)), None)
        device = torch.device("cpu") if given is None or isinstance(given, FakeTensor) else given.device
        result, self.seconds = seconds_of(lambda: call.function(*call.args, **call.kwargs), device)
        return result

    def _costs(self, call: Call, rule: Rule, result: Tensor) -> Costs:
        """The costs of computing the result of the call that has just run once more."""
        seconds, function = self.seconds, call.function
        measured = self._measured_call(call, result)
        if measured is not None:
            self._busy.append((len(self.values), len(self.events), measured))
            self.events.append((Event.BUSY, 0))
            self._backward[node_number(result.grad_fn)] = measured
        if isinstance(result, FakeTensor):
            self._is_fake = True
            seconds = estimated_seconds(function, call.arguments, result)
        elif function in FOLLOWED and self.estimates is None:  # by another function than the network's
            key = (function, result.shape, result.dtype)
            if key not in self._measured:
                self._measured[key] = self._seconds_again(call, rule, result)
            seconds = self._measured[key]
        return Costs(seconds, 0, operations_of(function, call.arguments, result))

    def _measured_call(self, call: Call, result: Tensor) -> MeasuredCall | None:
        """The call, if it can be measured on other tensors: it draws no numbers, and writes over nothing."""
        tensors = [one for one in call.arguments if isinstance(one, Tensor)]
        if self.estimates is None and isinstance(result, FakeTensor):
            return None
        if "dropout" in getattr(call.function, "__name__", "") or any(one is result for one in tensors):
            return None
        if not all(map(is_ordinary, tensors)) or sum(one.nbytes for one in tensors) < _SMALL:
            return None
        return call_of(call.function, call.args, call.kwargs)

    def _seconds_again(self, call: Call, rule: Rule, result: Tensor) -> float:
        try:
            again = rule(lambda tensor, lend=False: tensor, call.args, call.kwargs, result)
        except NotFollowed:
            return self.seconds
        with torch.no_grad():
            given = [one.get() if isinstance(one, (Value, Kept)) else one for one in again.arguments]
            return seconds_again(lambda: again.function(*given), result.device)

    def watch_backward(self, outputs: Iterable[Tensor], start: int) -> None:
        """The forward pass has ended. `start`: sequence number of its first node."""
        pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            call = self._backward.get(node_number(node))
            self._handles.append(node.register_prehook(self._gradients))
            self._handles.append(node.register_hook(partial(self._after, call)))
            for following, _ in node.next_functions:
                if following is None or following in seen or hasattr(following, "variable"):
                    continue
                if node_number(following) >= start:
                    seen.add(following)
                    pending.append(following)

    def _after(self, call: MeasuredCall | None, found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        """A node of the backward pass has run."""
        self._gradients(found)
        if call is not None and given and given[0] is not None:
            self._busy_backward.append((len(self.events), call, given[0].stride()))
            self.events.append((Event.BUSY, 0))

    def _gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass holds these tensors."""
        self.ran = True
        for gradient in gradients:
            if gradient is not None:
                self.holds(gradient)

    def progress(self) -> Progress:
        """How far the step has come."""
        is_released = self.forward >= 0 and self.released == len(self.saved)
        if self.ran:
            has_ended = is_released or not backward_runs()  # a reentrant checkpoint runs a backward pass inside
            return Progress.ENDED if has_ended else Progress.RUNS
        return Progress.DROPPED if is_released else Progress.RUNS

    def step(self) -> Step:
        """The step, once it has ended."""
        for handle in self._handles:
            handle.remove()
        estimates, is_exact = self.estimates or Estimates(), not self._is_fake
        for number, event, call in self._busy:
            taken = estimates.forward(call, is_exact)
            self.events[event] = Event.BUSY, int(taken.busy)
            seconds = self.values[number].seconds if self.estimates is None else taken.seconds
            self.values[number] = self.values[number]._replace(busy=int(taken.busy), seconds=seconds)
        for event, call, stride in self._busy_backward:
            self.events[event] = Event.BUSY, estimates.backward(call, stride, is_exact)
        return Step(self.values, self.memories, self.saved, self.events, self.forward, self.calls)
