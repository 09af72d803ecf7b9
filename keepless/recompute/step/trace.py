"""The values of a counted step, by the recorder's rules: numbered, and without their tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inputs import tensors_in
from ...saved import ByStorage, Gone, Kept, ShapeOnly, is_ordinary
from ...torch_internals import at_end_of_backward, backward_runs
from ..held.calls import Call
from ..held.signs import unpacking_bytes
from ..held.values import Again, Memory, Recipe, Saved, Value
from ..passes.plan import Flag
from ..passes.recipes import STATE_BYTES, how_to_repeat
from ..passes.registry import Registry
from ..table.rules import Rule, mask_needs_only_shape
from .costs import spec_of
from .step import Event, Kind, Save, Step, StepValue, busy, in_order

# CPU overhead of repeating a call, and of each save of a dropped tensor, in `host_seconds`.
_REPEATS, _SAVES = 3, 2.5
_OF_CHECKPOINT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint, which first runs without gradients


class _NotHeld(Kept):
    """Stands for a kept tensor, which exists only as long as the program holds it."""

    __slots__ = ()

    def __init__(self, tensor: Tensor | None, hooks: None, name: str = "", detaches: bool = True):
        self.hooks = None

    def is_modified(self) -> bool:
        """True, so that nothing copies or packs the tensor."""
        return True


class _CallSpan(NamedTuple):
    """The events and operators of a call that has run."""

    begin: int  # its events: from this number
    end: int  # to this one, excluded
    first: int  # its operators, likewise
    last: int
    besides: int = 0  # temporary bytes that these events do not show


def ends_watch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of watching end the watch instead of the program's step."""

    @wraps(method)
    def watched(trace: "Trace", *args: Any) -> Any:
        if not trace.is_over:
            try:
                return method(trace, *args)
            except Exception as error:
                trace.fail(error)
        return None

    return watched


class Trace(Registry):
    """Registry of the values that a step could keep or recompute, found as a recorder with a plan finds them.

    Here values that could be recomputed count as kept. A subclass notes allocations and operators. `made_here`: the
    number of a tensor's memory; None if it existed before the step.
    """

    kept = _NotHeld
    is_over = False

    def __init__(self, inputs: Sequence[Tensor], made_here: Callable[[Tensor], int | None]) -> None:
        super().__init__(inputs, None, copy_parameters=False, by_plan=True)
        self.short_rows = 0  # statistics of rows have values
        self.made_here = made_here
        self.sizes: list[int] = []  # bytes of each memory
        self.values: list[StepValue] = []
        self.saved: list[Save] = []
        self.events: list[tuple[Event, int] | Gone] = []
        self.calls: list[tuple[Any, int]] = []
        self.total = 0  # bytes of all results so far
        self.forward = -1  # number of events in the forward pass, once it has ended
        self._pass: weakref.ref[Any] | None = None  # what the running backward pass calls at its end
        self.costly: list[tuple[int, _CallSpan]] = []  # values, and the calls that compute them
        self.open: list[Gone] = []  # saved tensors that autograd holds
        self.ran: list[Any] = []  # operators, as the subclass notes them
        self._before: ByStorage[int] = ByStorage()  # memories that existed before the step

    def place(self, tensor: Tensor) -> int:
        """The number of a tensor's memory. Not its address, which other memory gets once this is freed."""
        if (number := self.made_here(tensor)) is not None:
            return number
        storage = tensor.untyped_storage()
        found = self._before.get(storage)
        if found is None:
            found = self._before.put(storage, len(self.sizes))
            self.sizes.append(0)
        return found

    def fail(self, error: Exception) -> None:
        raise error

    # Values

    def remember(self, tensor: Tensor, value: Value) -> Value:
        if value.number < 0:
            if isinstance(value.source, Recipe):
                self._add(value, self._noted(Kind.DERIVED, tensor, _inputs(value.source)))
            else:
                self._add(value, self._noted(Kind.KEPT, tensor, ()))
                value.storage = self.place(tensor)
        return super().remember(tensor, value)

    def copied(self, tensor: Tensor) -> Value:
        return self._own(min(tensor.untyped_storage().nbytes(), tensor.nbytes))

    def narrowed(self, indices: Tensor, dtype: torch.dtype) -> Value:
        return self._own(dtype.itemsize * indices.numel())

    def _own(self, size: int) -> Value:
        """A value that is kept in memory of its own."""
        self.sizes.append(size)
        value = Value(_NotHeld(None, None), len(self.sizes) - 1, size)
        return self._add(value, StepValue(Kind.KEPT, value.storage, size, (), -1, -1))

    def _add(self, value: Value, noted: StepValue) -> Value:
        value.number = len(self.values)
        self.values.append(noted)
        return value

    def _noted(
        self,
        kind: Kind,
        tensor: Tensor,
        inputs: tuple[int, ...],
        call: int = -1,
        again: Again | None = None,
        leader: int = -1,
    ) -> StepValue:
        """Describe a value of the step. `inputs`: what its recipe reads. `again`: how to repeat its call."""
        memory = self.place(tensor)
        sharing = (i for i in inputs if self.values[i].memory == memory and self.values[i].kind != Kind.OVERWRITTEN)
        alias = -1 if again is not None and again.fresh else next(sharing, -1)
        flags = (False, False) if again is None else (again.fresh, again.can_overwrite and bool(inputs))
        size = 0 if alias >= 0 else max(tensor.nbytes, spec_of(tensor).size)
        return StepValue(kind, memory, size, inputs, alias, call, is_fresh=flags[0], overwrites=flags[1], leader=leader)

    def is_fixed(self, value: Value, argument: Tensor) -> bool:
        """As for the recorder, but a value that could be recomputed is fixed only once something has read it."""
        number = value.number
        while self.values[number].kind == Kind.DERIVED and self.values[number].inputs:
            number = self.values[number].inputs[0]
        is_kept = bool(value.consumers) or self.values[number].kind == Kind.KEPT
        return is_kept and super().is_fixed(value, argument)

    def kept_in_copy(self, value: Value | None, argument: Tensor, copy: Tensor) -> Again | Value:
        found = super().kept_in_copy(value, argument, copy)
        if isinstance(found, Value):
            self.values[found.number] = self.values[found.number]._replace(memory=self.place(copy))
        return found

    def is_lost(self, value: Value, overwritten: Tensor) -> bool:
        """Likewise; and if the value can be recomputed without this memory, the values in it always are from now on."""
        memory, pending, lost = self.place(overwritten), [value.number], []
        while pending:
            number = pending.pop()
            one = self.values[number]
            if one.kind == Kind.KEPT and one.memory == memory:
                return True
            if one.memory == memory or one.kind == Kind.DERIVED:
                pending += one.inputs
            if one.memory == memory and one.kind == Kind.FREE:
                lost.append(number)
        for number in lost:
            self.values[number] = self.values[number]._replace(kind=Kind.OVERWRITTEN)
        return False

    @ends_watch
    def note_overwritten(self, tensor: Tensor, before: int) -> None:
        """Give values that recipes read from overwritten memory a copy. `before`: number of values before the call."""
        memory, read = self.place(tensor), {i for one in self.values for i in one.inputs}
        for number, one in enumerate(self.values[:before]):
            if one.kind == Kind.KEPT and one.memory == memory and number in read:
                self.sizes.append(one.bytes)
                self.values[number] = one._replace(memory=len(self.sizes) - 1)

    def read_memory(self, memory: Memory, tensor: Tensor) -> None:
        """Likewise: these values stay there."""
        for saved, _ in memory.take_saves():
            number = saved.value.number
            self.values[number] = self.values[number]._replace(kind=Kind.KEPT, inputs=())
        self.note_overwritten(tensor, len(self.values))

    # Calls

    @ends_watch
    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        """Note the values that a call with a rule gives a plan to choose from."""
        number = len(self.calls)
        self.total += result.nbytes
        self.calls.append((call.function, self.total))
        again = how_to_repeat(self, rule, call, result)
        mask = how_to_repeat(self, call.row.mask, call, result) if call.row.mask is not None and call.inside else None
        own = self.find(result) or self.keep(result)
        parts = [part.value.number for part in call.inside]
        dropped = self._held_in_call(call, parts)
        ran = _CallSpan(call.began[0], len(self.events), call.began[1], len(self.ran))
        self.events += dropped
        if call.overwrites:  # it is repeated out of place; a part that it has overwritten is then laid out with gaps
            has_gaps = spec_of(result).size > result.nbytes
            ran = ran._replace(end=ran.begin, besides=result.nbytes if has_gaps else 0)
        drawn = self._random_state(result) if any(one is not None and one.draws for one in (again, mask)) else ()
        inputs = () if again is None else _inputs(again) + (drawn if again.draws else ())
        if again is None:
            self.values[own.number] = self._noted(Kind.KEPT, result, (), number)
        elif not parts or call.row.mask is not None:
            self.values[own.number] = self._noted(Kind.FREE, result, inputs, number, again)
            self.costly.append((own.number, ran))
        else:
            self.values[own.number] = self._noted(Kind.FREE, result, inputs, number, leader=parts[0])
            self._inside(parts, inputs, Flag.AGAIN, number)
            memories = {self.values[one].memory for one in (*parts, own.number)}  # it makes them all at once
            self.costly.append((parts[0], ran._replace(besides=sum(self.sizes[one] for one in memories))))
        if mask is not None:
            layout = sum(one.nbytes for one in tensors_in(call.arguments) if not mask_needs_only_shape(one))
            self._inside(parts, _inputs(mask) + drawn, Flag.MASK, number)
            self.costly.append((parts[0], ran._replace(end=ran.begin, besides=2 * result.nbytes + layout)))
        for saved in call.replaceable:
            saved.read_instead(own)
            self.saved[saved.number] = self.saved[saved.number]._replace(value=own.number)
        base = result._base
        if base is not None and base.numel() == result.numel() and call.has_made(base):
            if again is not None and base.is_contiguous() and result.is_contiguous():
                self._read_instead_of_base(own, self.find(base))
            self.remember(base, own)  # other views of it are recomputed from this

    def _read_instead_of_base(self, own: Value, of_base: Value | None) -> None:
        """What a call has saved as the base of its result is computed from the result."""
        if of_base is None or of_base is own or self.values[of_base.number].kind != Kind.KEPT:
            return
        for number, save in enumerate(self.saved):
            if save.value == of_base.number:
                self.saved[number] = save._replace(value=own.number)
                own.count(1)

    def _held_in_call(self, call: Call, parts: list[int]) -> list[tuple[Event, int] | Gone]:
        """Take out of the events that a call drops what it saves inside: a recorder holds that until the call ends."""
        held, begin = {(Event.LET, self.values[one].memory) for one in parts}, call.began[0]
        events = self.events[begin:]
        self.events[begin:] = [one for one in events if one not in held]
        return [one for one in events if one in held]

    def _random_state(self, result: Tensor) -> tuple[int, ...]:
        """The state of the generator, which a recipe that draws again holds. On CUDA it is in host memory."""
        return () if result.is_cuda else (self._own(STATE_BYTES).number,)

    def _inside(self, parts: list[int], inputs: tuple[int, ...], flag: int, number: int) -> None:
        """Note that what a call has saved inside can be recomputed; the first of these values has the costs."""
        for part in parts:
            self.values[part] = self.values[part]._replace(
                kind=Kind.FREE, inputs=inputs, call=number, leader=parts[0], flag=flag
            )

    # Saved tensors

    def holds(self, packed: Any, tensor: Tensor) -> tuple[Saved | Kept | ShapeOnly, int]:
        """Autograd holds `packed` for a tensor. Returns what a recorder gives it, and the number of the save, or -1."""
        saved, call = self.packed(tensor), self.call
        if self.forward < 0 and backward_runs():  # saved by a backward pass, for another one through it
            self.unseen = "torch.autograd.grad with create_graph=True (second derivatives)"
        if isinstance(saved, _NotHeld):
            if is_ordinary(tensor) and not (tensor.requires_grad and call is not None):
                memory = self.place(tensor)
                self.events.append((Event.HOLD, memory))
                self.open.append(Gone(packed, self.events, (Event.LET, memory)))
            return saved, -1
        number, signs, unpacking = len(self.saved), 0, 0
        if isinstance(saved, Saved):
            value, saved.number = saved.value.number, number
            if saved.reads_signs and not tensor._is_view():  # else its base is saved
                signs, unpacking = -(-tensor.numel() // 8), unpacking_bytes(tensor)
        else:  # only a shape: an empty tensor is made for its consumer
            value = len(self.values)
            self.values.append(self._noted(Kind.DERIVED, tensor, ()))
        self.saved.append(Save(value, signs, self.place(tensor), -1 if call is None else len(self.calls), unpacking))
        self.events.append((Event.SAVE, number))
        self.open.append(Gone(packed, self.events, (Event.RELEASE, number)))
        return saved, number

    @ends_watch
    def reads(self, save: int) -> None:
        """Note that the backward pass reads what autograd holds."""
        if save >= 0 and backward_runs():
            self.enters_pass()
            self.events.append((Event.READ, save))

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is running. One that raises an error drops its callbacks."""
        return self._pass is not None and self._pass() is not None

    def enters_pass(self) -> None:
        """A backward pass is running."""
        if not self.in_pass:
            at_end_of_backward(end := self.backward_ends)
            self._pass = weakref.ref(end)

    def backward_ends(self) -> None:
        self._pass = None
        self.events.append((Event.PASS, 0))

    # The step

    def forward_ends(self, outputs: Iterable[Tensor]) -> None:
        """Note that the forward pass has ended with these outputs."""
        self.forward = len(self.events)
        if any(type(node).__name__ == _OF_CHECKPOINT for node in nodes_of(outputs)):
            self.unseen = "a checkpoint of its own"

    def step_of(
        self, events: list[tuple[Event, int]], seconds: Sequence[float], operations: Sequence[int], host: float
    ) -> Step:
        """The step with these events, whose operators took these seconds. `host`: see `host_seconds`."""
        leaders = [number if one.leader < 0 else one.leader for number, one in enumerate(self.values)]
        saves = Counter(leaders[one.value] for one in self.saved if one.value >= 0)
        hosts = [host * (_REPEATS + _SAVES * saves[number]) for number in range(len(self.values))]
        for number, ran in self.costly:
            self.values[number] = self.values[number]._replace(
                seconds=sum(seconds[ran.first : ran.last]) + hosts[number],
                operations=sum(operations[ran.first : ran.last]),
                busy=max(0, busy(events[ran.begin : ran.end], self.sizes) + ran.besides),
            )
        for number, one in enumerate(self.values):
            if one.kind == Kind.DERIVED:
                self.values[number] = one._replace(seconds=hosts[number])
        values, saved = in_order(self.values, self.saved)
        found = Step(values, self.sizes, saved, events, self.forward, self.calls, self.unseen)
        return found._replace(seconds=sum(seconds), operations=sum(operations))


def _inputs(again: Again | Recipe) -> tuple[int, ...]:
    """The numbers of the values among a recipe's arguments."""
    return tuple(one.number for one in again.arguments if isinstance(one, Value))


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of a graph from its outputs on."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new
