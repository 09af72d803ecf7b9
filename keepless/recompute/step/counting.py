"""Count a training step: every allocation and release, and every operator's time and temporary memory."""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...made_tensors import Change, MadeTensors
from ...saved import Gone, Kept, ShapeOnly, copied, is_ordinary, modified_error
from ...torch_internals import (
    FakeTensor,
    OpOverload,
    address,
    all_packed_by,
    backward_runs,
    calling_module,
    dispatch_modes,
    next_node_number,
    node_number,
    pop_dispatch_mode,
    push_dispatch_mode,
    running_node,
    tree_map,
    without_function_modes,
)
from ..held.calls import Call
from ..held.elsewhere import SMALL, Elsewhere, Held
from ..passes.recording import Recording
from ..passes.registry import is_parameter
from ..table.rules import Rule
from .costs import (
    Operator,
    TensorSpec,
    cost_of,
    host_seconds,
    measure,
    operator_of,
    results_of,
    seconds_for,
    spec_of,
    work_of,
)
from .recurrent import WITH_WORKSPACE, temporaries_of, with_workspace
from .step import Event, Step
from .trace import Trace, ends_watch

_SMALL = 2**12  # bytes: an operator with smaller arguments is not measured
ADD = torch.ops.aten.add_.Tensor  # adds a gradient to the one that is there
_DEVICE = torch.ops.prim.device.default
# Fake tensors decompose these in Python: running them takes less time.
_SLOW = frozenset(f"native_{kind}_norm{end}" for kind in ("batch", "layer", "group") for end in ("", "_backward"))


class RunOperator(NamedTuple):
    """An operator that has run."""

    operator: Operator | None  # None: it is estimated
    moved: int  # bytes
    operations: int
    like: TensorSpec  # its first result
    temporaries: int = 0  # bytes, where it is not measured


class _Arrival(NamedTuple):
    """A gradient that a parameter is about to get."""

    was_there: bool  # it is added to an earlier one
    memory: int | None
    stride: tuple[int, ...]


class Counting(Trace):
    """Counts the step of a network in a context around its forward pass and another around its backward pass.

    `measures`: measure operators on tensors of ones once the step has ended. Otherwise times are estimated, and
    temporary memory is counted only in recurrent layers.
    """

    def __init__(self, inputs: Sequence[Tensor], measures: bool, copy_parameters: bool = False) -> None:
        self.allocations = Allocations(self)
        super().__init__(inputs, self.allocations.memory, copy_parameters)
        self.measures = measures
        self.call_starts: list[tuple[int, Any, Any]] = []  # calls: number of the next node, function and module
        self.places: list[tuple[int, Any, Any]] = []  # operators: number of events at their end, function and module
        self.elsewhere = Elsewhere()
        self._copies: dict[Any, Held | None] = {}  # by the places of their tensors, in the forward pass
        self._packs: dict[int, list[weakref.ref[Any]]] = {}  # by the numbers of their memories, in the forward pass
        self._exposed: set[int] = set()  # memories that the program may change unseen
        self.gradient_bytes = 0
        self.taken_over: set[int] = set()  # memories of gradients that a parameter has taken over
        self.arriving: dict[Tensor, _Arrival] = {}  # by parameter
        self._coming: list[tuple[int, tuple[Event, int]]] = []  # see `Step.coming`
        self._staying: list[int] = []  # memories of gradients that stay, if they come

    def leave_forward(self) -> None:
        self.call_starts.append((next_node_number(), "the loss", None))
        self._copies = {}
        self._packs = {}

    # Saved tensors

    def pack(self, tensor: Tensor) -> Any:
        with without_function_modes(), self.allocations.off():
            return Kept(tensor, None) if self.is_over else _Packed(tensor, self)

    @ends_watch
    def copy_elsewhere(self, packed: "_Packed", tensor: Tensor) -> Held | ShapeOnly | None:
        """Copy a tensor, for autograd to read instead. None: it stays, as what existed before the step does."""
        number = self.allocations.memory(tensor) if is_ordinary(tensor) else None
        if number is not None and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return ShapeOnly(tensor)
        if number is None or number in self._exposed:
            return None
        key = number, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.nbytes < SMALL:
            copy: Held | None = Held(copied(tensor), tensor.shape, tensor.stride(), tensor.device)
        elif key in self._copies:
            copy = self._copies[key]
        else:
            copy = self._copies[key] = self.elsewhere.hold(tensor)
            if self.elsewhere.is_full:
                raise RuntimeError(
                    "host memory has no room for what a watched step saves: recompute_activations(…, example=…) plans "
                    "by a dry step instead"
                )
        if copy is not None:
            self._packs.setdefault(number, []).append(weakref.ref(packed))
        return copy

    def read_as_pytorch(self, tensor: Tensor) -> None:
        super().read_as_pytorch(tensor)
        memory = self.allocations.memory(tensor)
        if memory is not None:
            self._exposed.add(memory)
            with self.allocations.off():
                for packed in [reference() for reference in self._packs.pop(memory, ())]:
                    if packed is not None:
                        packed.read_memory(tensor)

    # Gradients

    def watch_gradients(self, parameters: Iterable[Tensor]) -> list[Any]:
        """Note how the gradients of parameters come. Returns handles of hooks.

        Autograd adds a gradient to the one that is there. If there is none, it takes the new one over, or copies one
        that is laid out otherwise or that something else holds.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
        trained = [parameter for parameter in trained if is_ordinary(parameter)]
        handles = [parameter.register_hook(partial(self.gradient_comes, parameter)) for parameter in trained]
        return handles + [parameter.register_post_accumulate_grad_hook(self.gradient_came) for parameter in trained]

    @ends_watch
    def gradient_comes(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Hook: a parameter is about to get a gradient."""
        if gradient is not None and is_ordinary(gradient):
            memory = self.allocations.memory(gradient)
            self.arriving[parameter] = _Arrival(parameter.grad is not None, memory, gradient.stride())

    @ends_watch
    def gradient_came(self, parameter: Tensor) -> None:
        """Hook: autograd has added a gradient to the one that was there, has taken it over, or has copied it."""
        gradient = parameter.grad
        if parameter not in self.arriving or gradient is None:
            return
        was_there, memory, stride = self.arriving.pop(parameter)
        self.gradient_bytes += gradient.nbytes
        new_memory = None if was_there or not is_ordinary(gradient) else self.allocations.memory(gradient)
        is_taken_over = new_memory == memory
        if memory is None or stride != gradient.stride() or not (was_there or is_taken_over):
            self._note_copy(gradient, new_memory)
            return
        self.allocations.note_operator(ADD, (gradient, gradient), {}, gradient)  # it is added to one that is there
        self.note_place(ADD)
        if was_there:
            self._staying.append(memory)
        else:
            self.taken_over.add(memory)
            self._coming.append((len(self.events), (Event.BUSY, 0)))
            self.events.append((Event.LET, memory))

    def _note_copy(self, gradient: Tensor, memory: int | None) -> None:
        """Note that autograd has copied a gradient, which it would add to one that is there, and holds the copy."""
        begin = len(self.events)
        if memory is None:  # it was copied outside of all modes
            memory = len(self.sizes)
            self.sizes.append(gradient.nbytes)
            self.events.append((Event.BUSY, -1))
        else:
            begin = self.events.index((Event.HOLD, memory))
            self.events[begin] = Event.BUSY, -1
            self.taken_over.add(memory)
        self._coming.append((begin, (Event.HOLD, memory)))

    # The step

    def step(self, network: nn.Module) -> Step:
        """The step, once it has ended."""
        if self.measures:
            measure(ran.operator for ran in self.operators if ran.operator is not None)
        events = [event.event if isinstance(event, Gone) else event for event in self.events]
        for index, (event, number) in enumerate(events):
            if event == Event.BUSY:
                events[index] = event, 0 if number < 0 else _temporary_bytes(self.operators[number])
        ends = {memory: index for index, (event, memory) in enumerate(events) if event == Event.LET}
        staying = [(ends[memory], (Event.BUSY, 0)) for memory in self._staying if memory in ends]
        host = host_seconds() if self.measures else 0.0
        operations = [ran.operations for ran in self.operators]
        step = self.step_of(events, list(map(_seconds, self.operators)), operations, host)
        coming = [*self._coming, *staying]
        return step._replace(places=self._named_places(network), gradients=self.gradient_bytes, coming=coming)

    def note_place(self, function: Any) -> None:
        """Note where an operator has run: in the last call, or in the backward pass of the call that made the node."""
        number = len(self.call_starts)
        if backward_runs():
            number = bisect_right(self.call_starts, node_number(running_node()), key=itemgetter(0))
        _, call, module = self.call_starts[number - 1] if number else (0, function, None)
        self.places.append((len(self.events), call, module))

    def _named_places(self, network: nn.Module) -> list[tuple[int, str]]:
        """See `Step.places`."""
        modules = network.named_modules()
        names = {id(module): f" in {name or 'the network'} ({type(module).__name__})" for name, module in modules}
        return [
            (end, getattr(call, "__name__", str(call)) + names.get(id(module and module()), ""))
            for end, call, module in self.places
        ]


class _Packed(Kept):
    """What autograd holds in a counted step: the tensor as it is, or a copy elsewhere."""

    __slots__ = ("_counting", "_tensor", "number", "saved")

    def __init__(self, tensor: Tensor, counting: Counting):
        self.saved: Any = None  # what a recorder gives autograd
        self.number = -1  # of the save
        self._counting = counting
        counting.note_save(self, tensor)
        copy = counting.copy_elsewhere(self, tensor)
        if copy is None:
            super().__init__(tensor, None)
        else:
            super().__init__(tensor, (lambda _: copy, lambda _: copy.get()))
            self._tensor = weakref.ref(tensor)

    def read_memory(self, sharing: Tensor) -> None:
        """Read the tensor itself from now on, as PyTorch does. `sharing`: another one in its memory."""
        tensor = self._tensor()
        if tensor is None:
            super().__init__(sharing.detach().as_strided(*self.place[1:]), None)
        else:
            is_own = any(packed is self for packed in all_packed_by(tensor.grad_fn))
            super().__init__(tensor, None, detaches=is_own)

    def get(self) -> Tensor:
        self._counting.note_read(self.number)
        if self.hooks is None:
            return super().get()
        with without_function_modes(), self._counting.allocations.off():
            tensor = super().get()
        if self.counter is not None and self.counter._version != self.version:  # a copy may not be read either
            raise modified_error(self.name, tensor, self.counter._version, self.version)
        return tensor


def _seconds(ran: RunOperator) -> float:
    cost = None if ran.operator is None else cost_of(ran.operator)
    return seconds_for(ran.moved, ran.operations, ran.like) if cost is None else cost.seconds


def _temporary_bytes(ran: RunOperator) -> int:
    cost = None if ran.operator is None else cost_of(ran.operator)
    return ran.temporaries if cost is None else cost.temporaries


class Allocations(MadeTensors):
    """Notes what a step allocates and frees, and the operators that run, in a `Counting` until that is over."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting
        self.memories: list[int] = []  # number of an allocation -> number of the memory
        self.outputs: set[int] = set()  # memories of outputs, which other steps may hold to their end
        self.gathered: set[int] = set()  # memories of parameters that FSDP has gathered
        self.is_off = False
        self._results: list[Any] = []  # of the running operator, once it has run

    def memory(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, if it was allocated in the step.

        A parameter that FSDP has gathered existed before it: FSDP frees its memory unseen.
        """
        number = self.number_of(tensor)
        if number is None:
            return None
        memory = self.memories[number]
        if is_parameter(tensor):
            self.counting.sizes[memory] = 0
            self.gathered.add(memory)
        return None if memory in self.gathered else memory

    @contextmanager
    def off(self) -> Any:
        """Context in which tensors do not count."""
        was_off = self.is_off
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = was_off

    def note(self, change: Change) -> None:
        super().note(change)
        counting = self.counting
        if change.bytes >= 0 and change.number == len(self.memories):
            self.memories.append(len(counting.sizes))
            counting.sizes.append(change.bytes)
            counting.events.append((Event.HOLD, self.memories[-1]))
            return
        memory = self.memories[change.number]
        if memory in counting.taken_over:
            counting.taken_over.discard(memory)
        elif memory not in self.outputs:
            counting.events.append((Event.LET, memory))

    def take_back(self) -> Change:
        change = super().take_back()
        events = self.counting.events
        hold = Event.HOLD, self.memories[change.number]
        index = next(i for i in reversed(range(len(events))) if events[i] == hold)
        events[index] = Event.BUSY, -1
        return change

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE and isinstance(args[0], FakeTensor):  # a very frequent query
            return args[0].fake_device
        if self.is_off or self.counting.is_over:
            return function(*args, **(kwargs or {}))
        try:
            result = super().__torch_dispatch__(function, types, args, kwargs)
            if not function.is_view:
                self.note_operator(function, args, kwargs or {}, result)
                self.counting.note_place(function)
            return result
        except Exception as error:
            if not self._results:  # the operator has raised it
                raise
            self.counting.fail(error)
            return self._results[0]
        finally:
            self._results = []

    def call(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        self._results = [self._run(function, args, kwargs)]
        return self._results[0]

    def _run(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator. Fake results are replaced if real ones would have another shape or other strides."""
        arguments = tensors_in((args, kwargs))
        name = function.overloadpacket.__name__
        is_fake = any(isinstance(argument, FakeTensor) for argument in arguments)
        if is_fake and name in _SLOW and self.counting.measures:
            as_real = self._like_real_results(function, args, kwargs)
            if as_real is not None:
                return as_real
        result = function(*args, **kwargs)
        if not is_fake or function.is_view:
            return result
        if not self.counting.measures:
            return with_workspace(function, args, kwargs, result)
        is_usual = all(argument.is_contiguous() for argument in arguments) and name not in WITH_WORKSPACE
        if is_usual or torch.Tag.pointwise in function.tags or arguments[0] is result:
            return result
        as_real = self._like_real_results(function, args, kwargs)
        return result if as_real is None else as_real

    def _like_real_results(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Fake tensors like the operator's results on real tensors; None if these are unknown."""
        operator = operator_of(function, args, kwargs)
        results = None if operator is None else results_of(operator)
        return tree_map(lambda leaf: leaf.empty() if isinstance(leaf, TensorSpec) else leaf, results)

    def note_operator(self, function: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note the costs of an operator that has run."""
        results = [tensor for tensor in tensors_in(result) if is_ordinary(tensor)]
        if not results or self._sum is not None:
            return
        moved, operations = work_of(function, args, kwargs, result)
        operator = operator_of(function, args, kwargs) if self.counting.measures and moved >= _SMALL else None
        temporaries = 0 if self.counting.measures else temporaries_of(function, args, kwargs)
        if operator is not None or temporaries:
            self.counting.events.append((Event.BUSY, len(self.counting.operators)))
        self.counting.operators.append(RunOperator(operator, moved, operations, spec_of(results[0]), temporaries))


class CountedRecording(Recording):
    """Records the forward pass of a counted step, and notes what could be recomputed, for a plan that is made later.

    `frame`: see `Recording`.
    """

    def __init__(self, counting: Counting, frame: FrameType | None = None) -> None:
        super().__init__(frame=frame)
        self.counting = counting

    def __enter__(self) -> "CountedRecording":
        # Entering the mode would set a flag of all threads, for which compiled blocks are skipped.
        push_dispatch_mode(self.counting.allocations)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.counting.leave_forward()
        self.leave_mode()

    def leave_mode(self) -> None:
        if dispatch_modes()[-1:] == [self.counting.allocations]:
            pop_dispatch_mode()

    def forget(self, has_raised: bool) -> None:
        super().forget(has_raised)
        why = "held elsewhere: this step is watched"
        self.kept = [row if row.made_by == "input" else row._replace(why=why) for row in self.kept]

    def new_registry(self) -> Counting:
        return self.counting

    def pack_hook(self) -> Callable[[Tensor], object]:
        return self.counting.pack

    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        self.counting.note_call(rule, call, result)

    def run(self, call: Call) -> Any:
        counting = self.counting
        counting.call_starts.append((call.first_node_number, call.function, calling_module()))
        call.began = len(counting.events), len(counting.operators)
        value_count = len(counting.values)
        result = super().run(call)
        target = call.args[0] if call.overwrites and call.args else None
        if isinstance(target, Tensor) and target.dim() and is_ordinary(target):  # scalars are counts
            counting.note_overwritten(target, value_count)
            is_view = isinstance(target, FakeTensor) and target._is_view()
            if is_view and torch.is_grad_enabled() and target.grad_fn is not None:
                target.grad_fn.register_hook(_in_new_memory)
        return result


def _in_new_memory(results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> Any:
    """Hook on the node of a view that was written over: with real tensors, the node copies its gradient.

    With fake ones it returns a view of its gradient, which would then exist as long as the view.
    """
    with without_function_modes():
        storages = {
            address(tensor.untyped_storage()) for tensor in gradients if tensor is not None and is_ordinary(tensor)
        }
        return tuple(
            result.new_empty_strided(result.shape, result.stride())
            if result is not None and is_ordinary(result) and address(result.untyped_storage()) in storages
            else result
            for result in results
        )
