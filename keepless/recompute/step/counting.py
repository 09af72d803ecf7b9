"""Count what a step allocates and releases, and every operator's time and temporary memory."""

from bisect import bisect_right
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...made_tensors import Change, MadeTensors
from ...saved import TensorSpec, is_ordinary
from ...torch_internals import (
    FakeTensor,
    OpOverload,
    backward_runs,
    node_number,
    running_node,
    tree_map,
    written_arguments,
)
from ..passes.registry import is_parameter
from .costs import Cost, Operator, cost_of, measure, operator_of, results_of, seconds_for, spec_of, work_of
from .recurrent import WITH_WORKSPACE, with_workspace
from .step import Event
from .trace import Trace

_SMALL = 2**12  # bytes: an operator with smaller arguments is not measured
_DEVICE = torch.ops.prim.device.default


class RunOperator(NamedTuple):
    """An operator that has run."""

    operator: Operator | None  # None: it is estimated
    moved: int  # bytes
    operations: int
    like: TensorSpec  # its first result
    temporaries: int = 0  # bytes, where it is not measured


@cache
def _written_inside(function: OpOverload) -> list[int]:
    """Positions of arguments that an operator writes besides its result, such as rrelu's noise, which its node saves.

    Autograd saves them before the operator runs.
    """
    is_in_place = function.overloadpacket.__name__.endswith("_")
    return [position for position, _ in written_arguments(function) if position > 0 or not is_in_place]


def _cost(ran: RunOperator) -> Cost:
    """The cost of an operator: as it was measured, or an estimate."""
    measured_cost = None if ran.operator is None else cost_of(ran.operator)
    return measured_cost or Cost(seconds_for(ran.moved, ran.operations, ran.like), ran.temporaries)


class Allocations(MadeTensors):
    """Notes what a step allocates and frees, and the operators that run, in a `Trace` until that is over.

    `measures`: measure operators on tensors of ones once the step has ended. Otherwise times are estimated, and
    temporary memory is not counted. `on_write`: gets arguments that an operator has just written,
    which autograd had saved before.
    """

    def __init__(self, trace: Trace, measures: bool, on_write: Callable[[Any], None]) -> None:
        super().__init__()
        self.trace = trace
        self.measures = measures
        self.on_write = on_write
        self.memories: list[int] = []  # number of an allocation -> number of the memory
        self.outputs: set[int] = set()  # memories of outputs, which other steps may hold to their end
        self.gathered: set[int] = set()  # memories of parameters that FSDP has gathered
        self.taken_over: set[int] = set()  # memories of gradients that a parameter has taken over
        self.call_starts: list[tuple[int, Any, Any]] = []  # calls: number of the next node, function and module
        self.places: list[tuple[int, Any, Any]] = []  # operators: number of events at their end, function and module
        self.is_off = False
        self._results: list[Any] = []  # of the running operator, once it has run

    def memory(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, if it was allocated in the step.

        A parameter whose memory is new was gathered by FSDP, which frees it unseen. From the first time that it is
        asked for here, it counts as memory from before the step.
        """
        number = self.number_of(tensor)
        if number is None:
            return None
        memory = self.memories[number]
        if is_parameter(tensor):
            self.trace.sizes[memory] = 0
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
        trace = self.trace
        if change.bytes >= 0 and change.number == len(self.memories):
            self.memories.append(len(trace.sizes))
            trace.sizes.append(change.bytes)
            trace.events.append((Event.HOLD, self.memories[-1]))
            return
        memory = self.memories[change.number]
        if memory in self.taken_over:
            self.taken_over.discard(memory)
        elif memory not in self.outputs:
            trace.events.append((Event.LET, memory))

    def take_back(self) -> Change:
        change = super().take_back()
        events = self.trace.events
        hold = Event.HOLD, self.memories[change.number]
        index = next(i for i in reversed(range(len(events))) if events[i] == hold)
        events[index] = Event.BUSY, -1
        return change

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE and isinstance(args[0], FakeTensor):  # a very frequent query
            return args[0].fake_device
        if self.is_off or self.trace.is_over:
            return function(*args, **(kwargs or {}))
        try:
            result = super().__torch_dispatch__(function, types, args, kwargs)
            if not function.is_view:
                self.note_operator(function, args, kwargs or {}, result)
                self.note_place(function)
                for position in _written_inside(function):
                    if position < len(args):  # not out=
                        self.on_write(args[position])
            return result
        except Exception as error:
            if not self._results:  # the operator has raised it
                raise
            self.trace.fail(error)
            return self._results[0]
        finally:
            self._results = []

    def call(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        self._results = [self._run(function, args, kwargs)]
        return self._results[0]

    def _run(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator. Fake results are replaced where real ones may have another shape or other strides."""
        arguments = tensors_in((args, kwargs))
        result = function(*args, **kwargs)
        if function.is_view or not any(isinstance(argument, FakeTensor) for argument in arguments):
            return result
        if not self.measures:
            return with_workspace(function, args, kwargs, result)
        has_workspace = function.overloadpacket.__name__ in WITH_WORKSPACE
        is_usual = all(argument.is_contiguous() for argument in arguments) and not has_workspace
        if is_usual or torch.Tag.pointwise in function.tags or arguments[0] is result:
            return result
        operator = operator_of(function, args, kwargs)
        real_results = None if operator is None else results_of(operator)
        if real_results is None:
            return result
        return tree_map(lambda leaf: leaf.get() if isinstance(leaf, TensorSpec) else leaf, real_results)

    def note_operator(self, function: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note the costs of an operator that has run."""
        results = [tensor for tensor in tensors_in(result) if is_ordinary(tensor)]
        if not results or self._sum is not None:
            return
        moved, operations = work_of(function, args, kwargs, result)
        operator = operator_of(function, args, kwargs) if self.measures and moved >= _SMALL else None
        if operator is not None:
            self.trace.events.append((Event.BUSY, len(self.trace.operators)))
        self.trace.operators.append(RunOperator(operator, moved, operations, spec_of(results[0])))

    def note_place(self, function: Any) -> None:
        """Note where an operator has run: in the last call, or in the backward pass of the call that made the node."""
        number = len(self.call_starts)
        if backward_runs():
            number = bisect_right(self.call_starts, node_number(running_node()), key=itemgetter(0))
        _, call, module = self.call_starts[number - 1] if number else (0, function, None)
        self.places.append((len(self.trace.events), call, module))

    def named_places(self, network: nn.Module) -> list[tuple[int, str]]:
        """See `Step.places`."""
        modules = network.named_modules()
        names = {id(module): f" in {name or 'the network'} ({type(module).__name__})" for name, module in modules}
        return [
            (end, getattr(call, "__name__", str(call)) + names.get(id(module and module()), ""))
            for end, call, module in self.places
        ]

    def costs(self) -> list[Cost]:
        """The costs of all operators, measured now or estimated."""
        if self.measures:
            measure(ran.operator for ran in self.trace.operators if ran.operator is not None)
        return [_cost(ran) for ran in self.trace.operators]
