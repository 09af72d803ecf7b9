"""The values of a counted step, by the recorder's rules: numbered, and without their tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inputs import tensors_in
from ...saved import ByStorage, Gone, Kept, is_ordinary
from ...torch_internals import at_end_of_backward, backward_runs
from ..held.calls import Call
from ..held.signs import unpacking_bytes
from ..held.values import Again, Memory, Recipe, Saved, Value
from ..passes.packing import make_holder
from ..passes.plan import Flag
from ..passes.recipes import STATE_BYTES, prepare_to_repeat
from ..passes.registry import Registry
from ..table.rules import Rule, mask_needs_only_shape
from .costs import Cost, spec_of
from .step import Event, Kind, Save, Step, StepValue, busy, in_order

_REPEATS = 3  # CPU overhead of repeating a call, in `HOST_SECONDS`
_SAVES = 2.5  # and of each save of a dropped tensor
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

    events: slice
    operators: slice
    extra_bytes: int = 0  # temporary ones that these events do not show


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

    Here values that could be recomputed count as kept. A subclass notes allocations and operators. `step_memory`: the
    number of a tensor's memory; None if it existed before the step.
    """

    kept_class = _NotHeld
    is_over = False

    def __init__(
        self, inputs: Sequence[Tensor], step_memory: Callable[[Tensor], int | None], copy_parameters: bool
    ) -> None:
        super().__init__(inputs, None, copy_parameters, by_plan=True)
        self.short_row_count = 0  # statistics of rows have values
        self.step_memory = step_memory
        self.sizes: list[int] = []  # bytes of each memory
        self.values: list[StepValue] = []
        self.saved: list[Save] = []
        self.events: list[tuple[Event, int] | Gone] = []
        self.calls: list[tuple[Any, int]] = []
        self.forward = -1  # number of events in the forward pass, once it has ended
        self._pass: weakref.ref[Any] | None = None  # what the running backward pass calls at its end
        self.call_spans: list[tuple[int, _CallSpan]] = []  # values, and the calls that compute them
        self.open_saves: list[Gone] = []  # saved tensors that autograd holds
        self.operators: list[Any] = []  # that have run, as the subclass notes them
        self._earlier_memories: ByStorage[int] = ByStorage()  # which existed before the step

    def place(self, tensor: Tensor) -> int:
        """The number of a tensor's memory. Not its address, which other memory gets once this is freed."""
        memory = self.step_memory(tensor)
        if memory is not None:
            return memory
        storage = tensor.untyped_storage()
        memory = self._earlier_memories.get(storage)
        if memory is None:
            memory = self._earlier_memories.put(storage, len(self.sizes))
            self.sizes.append(0)
        return memory

    def fail(self, error: Exception) -> None:
        raise error

    # Values

    def remember(self, tensor: Tensor, value: Value) -> Value:
        if value.number < 0:
            if isinstance(value.source, Recipe):
                self._add(value, self._step_value(Kind.DERIVED, tensor, _inputs(value.source)))
            else:
                self._add(value, self._step_value(Kind.KEPT, tensor))
                value.storage = self.place(tensor)
        return super().remember(tensor, value)

    def keep_copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Value:
        if dtype is not None:
            return self._kept_alone(dtype.itemsize * tensor.numel())
        return self._kept_alone(min(tensor.untyped_storage().nbytes(), tensor.nbytes))

    def _kept_alone(self, size: int) -> Value:
        """A value that is kept in memory of its own."""
        self.sizes.append(size)
        value = Value(_NotHeld(None, None), len(self.sizes) - 1, size)
        return self._add(value, StepValue(Kind.KEPT, value.storage, size, (), -1, -1))

    def _add(self, value: Value, step_value: StepValue) -> Value:
        value.number = len(self.values)
        self.values.append(step_value)
        return value

    def _step_value(
        self, kind: Kind, tensor: Tensor, inputs: tuple[int, ...] = (), call: int = -1, is_fresh: bool = False
    ) -> StepValue:
        """Describe a value of the step. `inputs`: what its recipe reads."""
        memory = self.place(tensor)
        sharing = (i for i in inputs if self.values[i].memory == memory and self.values[i].kind != Kind.OVERWRITTEN)
        alias = -1 if is_fresh else next(sharing, -1)
        size = 0 if alias >= 0 else max(tensor.nbytes, spec_of(tensor).size)
        return StepValue(kind, memory, size, inputs, alias, call, is_fresh=is_fresh)

    def is_fixed(self, value: Value, argument: Tensor) -> bool:
        """As for the recorder, but a value that could be recomputed is fixed only once something has read it."""
        number = value.number
        while self.values[number].kind == Kind.DERIVED and self.values[number].inputs:
            number = self.values[number].inputs[0]
        is_kept = bool(value.consumer_count) or self.values[number].kind == Kind.KEPT
        return is_kept and super().is_fixed(value, argument)

    def move_to_copy(self, value: Value, copy: Tensor) -> None:
        super().move_to_copy(value, copy)
        self._change(value.number, memory=self.place(copy))

    def is_lost(self, value: Value, overwritten: Tensor) -> bool:
        """Whether a value, or one from which it follows, is always kept in the memory of an overwritten tensor."""
        memory = self.place(overwritten)
        values = [self.values[number] for number in self._sources(value, memory)]
        return any(source.kind == Kind.KEPT and source.memory == memory for source in values)

    def note_read_when_overwritten(self, value: Value, overwritten: Tensor) -> None:
        """A recipe reads a value that a call has overwritten: no plan may keep it, nor what it follows from, there."""
        memory = self.place(overwritten)
        for number in self._sources(value, memory):
            if self.values[number].memory == memory and self.values[number].kind == Kind.FREE:
                self._change(number, kind=Kind.OVERWRITTEN)

    def _sources(self, value: Value, memory: int) -> list[int]:
        """A value, and all from which it follows if nothing can be read from this memory."""
        pending = [value.number]
        numbers: list[int] = []
        while pending:
            number = pending.pop()
            numbers.append(number)
            if self.values[number].memory == memory or self.values[number].kind == Kind.DERIVED:
                pending += self.values[number].inputs
        return numbers

    @ends_watch
    def note_overwritten(self, tensor: Tensor, value_count: int) -> None:
        """Give values that recipes read from overwritten memory a copy. `value_count`: of values before the call."""
        memory = self.place(tensor)
        inputs = {number for value in self.values for number in value.inputs}
        for number, value in enumerate(self.values[:value_count]):
            if value.kind == Kind.KEPT and value.memory == memory and number in inputs:
                self.sizes.append(value.bytes)
                self._change(number, memory=len(self.sizes) - 1)

    def read_memory(self, memory: Memory, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a memory from the memory itself: no plan recomputes these values."""
        for saved, _ in memory.take_saves():
            self._change(saved.value.number, kind=Kind.KEPT, inputs=())
        self.note_overwritten(tensor, len(self.values))

    # Calls

    @ends_watch
    def note_call(self, rule: Rule, call: Call, result: Tensor) -> None:
        """Note the values that a call with a rule gives a plan to choose from: its result, and what it saves inside."""
        self.calls.append((call.function, result.nbytes + (self.calls[-1][1] if self.calls else 0)))
        has_mask = call.row.mask is not None and bool(call.inside)
        again = prepare_to_repeat(self, rule, call, result)
        mask = prepare_to_repeat(self, call.row.mask, call, result) if has_mask else None
        value = self.find_value(result) or self.keep(result)
        parts = [part.value.number for part in call.inside]
        span = _span_of_call(call, result, self._postpone_drops(call.began[0], parts), len(self.operators))
        state = self._random_state(result, again, mask)
        if again is None:
            self.values[value.number] = self._step_value(Kind.KEPT, result, call=len(self.calls) - 1)
        else:
            inputs = _inputs(again) + (state if again.draws else ())
            if parts and not has_mask:
                self._note_recipe_with_parts(inputs, result, value.number, parts, span)
            else:
                self._note_recipe(again, inputs, result, value.number, span)
        if mask is not None:
            self._note_inside(parts, _inputs(mask) + state, Flag.MASK)
            self.call_spans.append((parts[0], _span_of_mask(span, call, result)))
        for saved in call.replaceable:
            saved.read_instead(value)
            self.saved[saved.number] = self.saved[saved.number]._replace(value=value.number)
        self._share_value_with_base(value, again, call, result)

    def _note_recipe(self, again: Again, inputs: tuple[int, ...], result: Tensor, number: int, span: _CallSpan) -> None:
        """Note that a recipe computes the result of the last call, which has this number, alone."""
        value = self._step_value(Kind.FREE, result, inputs, len(self.calls) - 1, again.fresh)
        self.values[number] = value._replace(overwrites=again.can_overwrite and bool(inputs))
        self.call_spans.append((number, span))

    def _note_recipe_with_parts(
        self, inputs: tuple[int, ...], result: Tensor, number: int, parts: list[int], span: _CallSpan
    ) -> None:
        """Note that a recipe computes the result of the last call and the parts that the call saves inside.

        A plan chooses them as one, led by the first part, and a repetition holds the memories of all at once.
        """
        call = len(self.calls) - 1
        self.values[number] = self._step_value(Kind.FREE, result, inputs, call)._replace(leader=parts[0])
        self._note_inside(parts, inputs, Flag.AGAIN)
        memories = {self.values[i].memory for i in (*parts, number)}
        self.call_spans.append((parts[0], span._replace(extra_bytes=sum(self.sizes[memory] for memory in memories))))

    def _postpone_drops(self, first_event: int, parts: list[int]) -> int:
        """Let a call drop what it saves inside when it ends, as by a recorder. Returns the number of the first drop."""
        drops = {(Event.LET, self.values[number].memory) for number in parts}
        events = self.events[first_event:]
        rest = [event for event in events if event not in drops]
        self.events[first_event:] = [*rest, *(event for event in events if event in drops)]
        return first_event + len(rest)

    def _share_value_with_base(self, value: Value, again: Again | None, call: Call, result: Tensor) -> None:
        """If a result is a view of all that its call has made, give its base its value, from which other views follow.

        What the call has saved as the base is computed from a result with a recipe only if both are contiguous, since
        the recorder computes it by `Tensor.view`.
        """
        base = result._base
        if base is None or base.numel() != result.numel() or not call.has_made(base):
            return
        if again is not None and base.is_contiguous() and result.is_contiguous():
            self._read_instead_of_base(value, self.find_value(base))
        self.remember(base, value)

    def _read_instead_of_base(self, value: Value, base_value: Value | None) -> None:
        """What a call has saved as the base of its result is computed from the result."""
        if base_value is None or base_value is value or self.values[base_value.number].kind != Kind.KEPT:
            return
        for number, save in enumerate(self.saved):
            if save.value == base_value.number:
                self.saved[number] = save._replace(value=value.number)
                value.count_consumer(1)

    def _random_state(self, result: Tensor, *recipes: Again | None) -> tuple[int, ...]:
        """The state of the generator, which recipes that draw again hold. On CUDA it is in host memory."""
        draws = any(recipe is not None and recipe.draws for recipe in recipes)
        return (self._kept_alone(STATE_BYTES).number,) if draws and not result.is_cuda else ()

    def _note_inside(self, parts: list[int], inputs: tuple[int, ...], flag: int) -> None:
        """Note that what the last call has saved inside can be recomputed; the first of these values has the costs."""
        call = len(self.calls) - 1
        for number in parts:
            self._change(number, kind=Kind.FREE, inputs=inputs, call=call, leader=parts[0], flag=flag)

    def _change(self, number: int, **fields: Any) -> None:
        """Change fields of a value of the step."""
        self.values[number] = self.values[number]._replace(**fields)

    # Saved tensors

    @ends_watch
    def note_save(self, packed: Any, tensor: Tensor) -> None:
        """Autograd holds `packed` for a tensor. It gets what a recorder would give, and the number of the save."""
        packed.saved = saved = make_holder(self, tensor)
        if self.forward < 0 and backward_runs():  # saved by a backward pass, for another one through it
            self.unseen = "torch.autograd.grad with create_graph=True (second derivatives)"
        if isinstance(saved, _NotHeld):
            if is_ordinary(tensor) and not (tensor.requires_grad and self.call is not None):
                self._note_held(packed, Event.HOLD, Event.LET, self.place(tensor))
            return
        packed.number = len(self.saved)
        if isinstance(saved, Saved):
            saved.number = packed.number
            self.saved.append(self._save_of(saved, tensor))
        else:  # only a shape: an empty tensor is made for its consumer
            value = len(self.values)
            self.values.append(self._step_value(Kind.DERIVED, tensor))
            self.saved.append(Save(value, 0, self.place(tensor)))
        self._note_held(packed, Event.SAVE, Event.RELEASE, packed.number)

    def _save_of(self, saved: Saved, tensor: Tensor) -> Save:
        """Describe the save of a tensor that has a value."""
        save = Save(saved.value.number, 0, self.place(tensor))
        if not saved.reads_signs or tensor._is_view():  # of a view the base is saved
            return save
        return save._replace(signs=-(-tensor.numel() // 8), unpacking=unpacking_bytes(tensor))

    def _note_held(self, packed: Any, begin: Event, end: Event, number: int) -> None:
        """Note that something is held from now on, until autograd drops `packed`."""
        self.events.append((begin, number))
        self.open_saves.append(Gone(packed, self.events, (end, number)))

    @ends_watch
    def note_read(self, save: int) -> None:
        """Note that the backward pass reads what autograd holds."""
        if save >= 0 and backward_runs():
            self.enter_pass()
            self.events.append((Event.READ, save))

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is running. One that raises an error drops its callbacks."""
        return self._pass is not None and self._pass() is not None

    def enter_pass(self) -> None:
        """A backward pass is running."""
        if not self.in_pass:
            callback = self.backward_ends
            at_end_of_backward(callback)
            self._pass = weakref.ref(callback)

    def backward_ends(self) -> None:
        self._pass = None
        self.events.append((Event.PASS, 0))

    # The step

    def forward_ends(self, outputs: Iterable[Tensor]) -> None:
        """Note that the forward pass has ended with these outputs."""
        self.forward = len(self.events)
        if any(type(node).__name__ == _OF_CHECKPOINT for node in nodes_of(outputs)):
            self.unseen = "a checkpoint of its own"

    def step_of(self, events: list[tuple[Event, int]], costs: Sequence[Cost], host: float) -> Step:
        """The step with these events, and these costs of its operators. `host`: see `HOST_SECONDS`."""
        values, saved = in_order(self._values_with_costs(events, costs, host), self.saved)
        step = Step(values, self.sizes, saved, events, self.forward, self.calls, self.unseen)
        operations = sum(ran.operations for ran in self.operators)
        return step._replace(seconds=sum(cost.seconds for cost in costs), operations=operations)

    def _values_with_costs(
        self, events: list[tuple[Event, int]], costs: Sequence[Cost], host: float
    ) -> list[StepValue]:
        """The values with the costs of the calls that compute them. Arguments as for `step_of`."""
        values = list(self.values)
        seconds = [cost.seconds for cost in costs]
        operations = [ran.operations for ran in self.operators]
        leaders = [number if value.leader < 0 else value.leader for number, value in enumerate(self.values)]
        save_counts = Counter(leaders[save.value] for save in self.saved if save.value >= 0)
        host_costs = [host * (_REPEATS + _SAVES * save_counts[number]) for number in range(len(self.values))]
        for number, span in self.call_spans:
            values[number] = values[number]._replace(
                seconds=sum(seconds[span.operators]) + host_costs[number],
                operations=sum(operations[span.operators]),
                busy=max(0, busy(events[span.events], self.sizes) + span.extra_bytes),
            )
        for number, value in enumerate(values):
            if value.kind == Kind.DERIVED:
                values[number] = value._replace(seconds=host_costs[number])
        return values


def _span_of_call(call: Call, result: Tensor, end_event: int, end_operator: int) -> _CallSpan:
    """The events and operators of a call that has just run."""
    first_event, first_operator = call.began
    operators = slice(first_operator, end_operator)
    if not call.overwrites:
        return _CallSpan(slice(first_event, end_event), operators)
    # It is repeated out of place. A part that it has overwritten is then laid out with gaps.
    has_gaps = spec_of(result).size > result.nbytes
    return _CallSpan(slice(0), operators, result.nbytes if has_gaps else 0)


def _span_of_mask(span: _CallSpan, call: Call, result: Tensor) -> _CallSpan:
    """The operators of a call with a mask, and the bytes to draw the mask alone."""
    layout = sum(argument.nbytes for argument in tensors_in(call.arguments) if not mask_needs_only_shape(argument))
    return span._replace(events=slice(0), extra_bytes=2 * result.nbytes + layout)


def _inputs(recipe: Again | Recipe) -> tuple[int, ...]:
    """The numbers of the values among a recipe's arguments."""
    return tuple(argument.number for argument in recipe.arguments if isinstance(argument, Value))


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of a graph from its outputs on."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        next_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= next_nodes
        pending += next_nodes
