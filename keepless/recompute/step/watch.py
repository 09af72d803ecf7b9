"""Watch a step, the program's own or a dry one: the forward pass call by call, the backward pass node by node.

Nothing is copied or run twice. What autograd saves is held elsewhere until the backward pass reads it, so this step
takes less memory than later ones. An error of watching ends the watch, not the step.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import Gone, Kept, TensorSpec, copied, is_ordinary, modified_error
from ...torch_internals import (
    FakeTensor,
    address,
    all_packed_by,
    calling_module,
    dispatch_modes,
    next_node_number,
    node_number,
    pop_dispatch_mode,
    push_dispatch_mode,
    without_function_modes,
)
from ..held.calls import Call
from ..held.elsewhere import SMALL, Elsewhere, Held
from ..passes.recording import Recording
from ..table.rules import Rule
from .costs import spec_of
from .counting import Allocations, RunOperator
from .step import Event, Step
from .trace import Trace, ends_watch, nodes_of

HOST_SECONDS = 8e-6  # CPU overhead of repeating a call in a saved-tensor hook
_LOSS = 4  # times an output's bytes, which a mean square of it takes in the backward pass, besides its gradient
_ADD = torch.ops.aten.add_.Tensor  # adds a gradient to the one that is there


def differentiable(outputs: object) -> list[Tensor]:
    """The outputs of a network where a backward pass starts. ValueError: no output needs a gradient."""
    trained = [output for output in tensors_in(outputs) if output.requires_grad]
    if not trained:
        raise ValueError(
            "no output of the network needs a gradient: train some of it, outside torch.no_grad(), and return tensors "
            "in lists, tuples, dictionaries or dataclasses"
        )
    return backward_starts(trained)


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one is a loss (a scalar), the outputs it is computed from are left out.

    Hugging Face's networks return the loss together with the logits.
    """
    seen = {*nodes_of(output for output in outputs if output.dim() == 0)}
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


class State(Enum):
    """How far a watch has come."""

    RUNS = auto()  # the forward pass, or the whole of a dry step
    AWAITS = auto()  # the backward pass of the program, or its end
    COUNTED = auto()  # the whole step
    LOST = auto()  # the forward pass has raised an error, or its graph is gone without a backward pass
    FAILED = auto()  # watching has raised an error


class _Arrival(NamedTuple):
    """A gradient that a parameter is about to get."""

    was_there: bool  # it is added to an earlier one
    memory: int | None
    stride: tuple[int, ...]


class Watch(Trace):
    """Counts a step, whose forward pass runs under a `WatchedRecording`. `measures`: see `Allocations`.

    A dry step runs its backward pass under the `allocations`. The program's is awaited: see `await_backward`.
    """

    def __init__(self, inputs: Sequence[Tensor], measures: bool, copy_parameters: bool = False) -> None:
        self.allocations = Allocations(self, measures, self._read_as_written)
        super().__init__(inputs, self.allocations.memory, copy_parameters)
        self.state = State.RUNS
        self.error: Exception | None = None  # that has ended the watch
        self.has_backward = False  # a backward pass has run through its graph
        self._handles: list[Any] = []  # of hooks on nodes and parameters
        self.elsewhere = Elsewhere()
        self._copies: dict[Any, Held | None] = {}  # by the places of their tensors, in the forward pass
        self._packs: dict[int, list[weakref.ref[Any]]] = {}  # by the numbers of their memories, in the forward pass
        self._exposed: set[int] = set()  # memories that the program may change unseen
        self._gradient_bytes = 0
        self._arriving: dict[Tensor, _Arrival] = {}  # by parameter
        self._coming: list[tuple[int, tuple[Event, int]]] = []  # see `Step.coming`
        self._staying: list[int] = []  # memories of gradients that stay, if they come

    def fail(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # its frames hold tensors
        self.end(State.FAILED)

    def end(self, state: State) -> None:
        """Stop watching, with this as the last state. A watch ends once: later calls, and their states, do nothing."""
        if self.is_over:
            return
        self.state = state
        self.is_over = True
        self.events = list(self.events)  # a copy: what autograd drops from now on is added to the old list alone
        self.allocations.alive.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._arriving.clear()
        self.elsewhere.close()

    def leave_forward(self) -> None:
        """The calls of the forward pass have run."""
        self.allocations.call_starts.append((next_node_number(), "the loss", None))
        self._copies = {}
        self._packs = {}

    @ends_watch
    def await_backward(self, network: nn.Module, outputs: Any) -> None:
        """Watch for the backward pass of the program, which begins at outputs of the network."""
        self.state = State.AWAITS
        tensors = tensors_in(outputs)
        self.forward_ends(tensors)
        for start in differentiable(outputs):  # the loss is not seen: a mean square stands for it
            self.events.append((Event.BUSY, len(self.operators)))
            self.operators.append(RunOperator(None, 0, 0, spec_of(start), _LOSS * start.nbytes))
        nodes = [node for node in nodes_of(tensors) if type(node).__name__ != "AccumulateGrad"]
        nodes = [node for node in nodes if node_number(node) >= self.storages.first_node_number]
        memories = [self.allocations.memory(tensor) for tensor in tensors if is_ordinary(tensor)]
        self.allocations.outputs = {memory for memory in memories if memory is not None}
        self._handles = [node.register_prehook(self._node_runs) for node in nodes]
        self.watch_gradients(network.parameters())

    def is_awaited(self) -> bool:
        """Whether its graph exists, so that its backward pass, or the rest of it, may come."""
        return any(reference() is not None for reference in self.open_saves)

    @ends_watch
    def _node_runs(self, gradients: Sequence[Tensor | None]) -> None:
        """Hook before a node of the backward pass runs: let `allocations` see its operators.

        The engine drops the mode once the node has run and its gradients have been added to others.
        """
        if torch.is_grad_enabled():  # it makes a graph of its own, as for a penalty on gradients
            return
        self.enter_pass()
        if self.allocations not in dispatch_modes():
            push_dispatch_mode(self.allocations)
        for gradient in gradients:
            if gradient is not None and is_ordinary(gradient) and self.allocations.number_of(gradient) is None:
                self.allocations.count_storage(gradient.untyped_storage())

    @ends_watch
    def backward_ends(self) -> None:
        super().backward_ends()
        self.has_backward = True
        if self.state is State.AWAITS and not self.is_awaited():
            self.conclude()

    def conclude(self) -> None:
        """The step has ended, or the rest of its graph will not run."""
        self.events += [(Event.LET, memory) for memory in self.allocations.outputs]
        self.end(State.COUNTED)

    def step(self, network: nn.Module) -> Step:
        """The step, once it has ended. Raises the error that has ended the watch, if there was one."""
        if self.error is not None:
            raise self.error
        costs = self.allocations.costs()
        events = [event.event if isinstance(event, Gone) else event for event in self.events]
        for index, (event, operator) in enumerate(events):
            if event == Event.BUSY:  # so far with the number of an operator; with -1 it stands for no event
                events[index] = event, 0 if operator < 0 else costs[operator].temporaries
        ends = {memory: index for index, (event, memory) in enumerate(events) if event == Event.LET}
        staying = [(ends[memory], (Event.BUSY, 0)) for memory in self._staying if memory in ends]
        host = HOST_SECONDS if self.allocations.measures else 0.0
        step = self.step_of(events, costs, host)
        places = self.allocations.named_places(network)
        return step._replace(places=places, gradients=self._gradient_bytes, coming=[*self._coming, *staying])

    # Saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """The saved-tensor hook of a watched pass."""
        with without_function_modes(), self.allocations.off():
            return Kept(tensor, None) if self.is_over else _Packed(tensor, self)

    @ends_watch
    def copy_elsewhere(self, packed: "_Packed", tensor: Tensor) -> Held | TensorSpec | None:
        """Copy a tensor, for autograd to read instead. None: it stays, as what existed before the step does."""
        number = self.allocations.memory(tensor) if is_ordinary(tensor) else None
        if number is not None and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return TensorSpec.from_tensor(tensor)
        if number is None or number in self._exposed:
            return None
        copy = self._copy_of(tensor, number)
        if copy is not None:
            self._packs.setdefault(number, []).append(weakref.ref(packed))
        return copy

    def _copy_of(self, tensor: Tensor, memory: int) -> Held | None:
        """A copy of a tensor, which those that are saved from the same place share; None if it cannot be held.

        RuntimeError: host memory has no room for it.
        """
        if tensor.nbytes < SMALL:
            return Held(copied(tensor), tensor.shape, tensor.stride(), tensor.device)
        key = memory, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._copies:
            self._copies[key] = self.elsewhere.hold(tensor)
            if self.elsewhere.is_full:
                raise RuntimeError(
                    "host memory has no room for what a watched step saves: recompute_activations(…, example=…) plans "
                    "by a dry step instead"
                )
        return self._copies[key]

    def read_as_pytorch(self, tensor: Tensor) -> None:
        super().read_as_pytorch(tensor)
        memory = self.allocations.memory(tensor)
        if memory is not None:
            self._exposed.add(memory)
            self._read_packs(memory, tensor)

    def _read_as_written(self, tensor: Any) -> None:
        """Let autograd read an argument, which an operator has written after it was saved, as it is now."""
        memory = self.allocations.memory(tensor) if isinstance(tensor, Tensor) and is_ordinary(tensor) else None
        if memory is not None:
            self._read_packs(memory, tensor)

    def _read_packs(self, memory: int, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a memory, in which a tensor is, from there instead of from copies."""
        with self.allocations.off():
            for packed in [reference() for reference in self._packs.pop(memory, ())]:
                if packed is not None:
                    packed.read_memory(tensor)

    # Gradients

    def watch_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Note how the gradients of parameters come, until the watch ends.

        Autograd adds a gradient to the one that is there. If there is none, it takes the new one over, or copies one
        that is laid out otherwise or that something else holds.
        """
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf and is_ordinary(parameter):
                self._handles.append(parameter.register_hook(partial(self._gradient_comes, parameter)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_came))

    @ends_watch
    def _gradient_comes(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Hook: a parameter is about to get a gradient."""
        if self.state is State.AWAITS and not self.in_pass:  # a backward pass through another graph
            return
        if gradient is not None and is_ordinary(gradient):
            memory = self.allocations.memory(gradient)
            self._arriving[parameter] = _Arrival(parameter.grad is not None, memory, gradient.stride())

    @ends_watch
    def _gradient_came(self, parameter: Tensor) -> None:
        """Hook: autograd has added a gradient to the one that was there, has taken it over, or has copied it."""
        gradient = parameter.grad
        if parameter not in self._arriving or gradient is None:
            return
        was_there, memory, stride = self._arriving.pop(parameter)
        self._gradient_bytes += gradient.nbytes
        new_memory = None if was_there or not is_ordinary(gradient) else self.allocations.memory(gradient)
        has_other_layout = stride != gradient.stride()
        if memory is None or has_other_layout or not (was_there or new_memory == memory):
            self._note_copy(gradient, new_memory)
            return
        self.allocations.note_operator(_ADD, (gradient, gradient), {}, gradient)  # it is added to one that is there
        self.allocations.note_place(_ADD)
        if was_there:
            self._staying.append(memory)
        else:
            self.allocations.taken_over.add(memory)
            self._coming.append((len(self.events), (Event.BUSY, 0)))
            self.events.append((Event.LET, memory))

    def _note_copy(self, gradient: Tensor, memory: int | None) -> None:
        """Note that autograd has copied a gradient, which it would add to one that is there, and holds the copy."""
        if memory is None:  # it was copied outside of all modes
            memory = len(self.sizes)
            self.sizes.append(gradient.nbytes)
            begin = len(self.events)
            self.events.append((Event.BUSY, -1))
        else:
            begin = self.events.index((Event.HOLD, memory))
            self.events[begin] = Event.BUSY, -1
            self.allocations.taken_over.add(memory)
        self._coming.append((begin, (Event.HOLD, memory)))


class _Packed(Kept):
    """What autograd holds in a watched step: the tensor as it is, or a copy elsewhere."""

    __slots__ = ("_tensor", "_watch", "number", "saved")

    def __init__(self, tensor: Tensor, watch: Watch):
        self.saved: Any = None  # what a recorder gives autograd
        self.number = -1  # of the save
        self._watch = watch
        watch.note_save(self, tensor)
        copy = watch.copy_elsewhere(self, tensor)
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
        self._watch.note_read(self.number)
        if self.hooks is None:
            return super().get()
        with without_function_modes(), self._watch.allocations.off():
            tensor = super().get()
        if self.counter is not None and self.counter._version != self.version:  # a copy may not be read either
            raise modified_error(self.name, tensor, self.counter._version, self.version)
        return tensor


class WatchedRecording(Recording):
    """Records the forward pass of a watched step, and notes what could be recomputed, for a plan that is made later.

    `frame`: see `Recording`.
    """

    def __init__(self, watch: Watch, frame: FrameType | None = None) -> None:
        super().__init__(frame=frame, registry=watch)
        self.watch = watch

    def __enter__(self) -> "WatchedRecording":
        # Entering the mode would set a flag of all threads, for which compiled blocks are skipped.
        push_dispatch_mode(self.watch.allocations)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.watch.leave_forward()
        self._leave_mode()

    def _leave_mode(self) -> None:
        if dispatch_modes()[-1:] == [self.watch.allocations]:
            pop_dispatch_mode()

    def end_if_abandoned(self) -> bool:
        is_abandoned = super().end_if_abandoned()
        if is_abandoned:  # by Ctrl-C
            self._leave_mode()
            self.watch.end(State.LOST)
        return is_abandoned

    def forget(self, has_raised: bool) -> None:
        super().forget(has_raised)
        why = "held elsewhere: this step is watched"
        self.kept = [row if row.made_by == "input" else row._replace(why=why) for row in self.kept]

    def pack_hook(self) -> Callable[[Tensor], object]:
        return self.watch.pack

    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        self.watch.note_call(rule, call, result)

    def run(self, call: Call) -> Any:
        watch = self.watch
        watch.allocations.call_starts.append((call.first_node_number, call.function, calling_module()))
        call.began = len(watch.events), len(watch.operators)
        value_count = len(watch.values)
        result = super().run(call)
        target = call.args[0] if call.overwrites and call.args else None
        if isinstance(target, Tensor) and target.dim() and is_ordinary(target):  # scalars are counts
            watch.note_overwritten(target, value_count)
            is_fake_view = isinstance(target, FakeTensor) and target._is_view()
            if is_fake_view and torch.is_grad_enabled() and target.grad_fn is not None:
                target.grad_fn.register_hook(_in_new_memory)
        return result


def watched_pass(module: nn.Module, inputs: Sequence[Tensor], frame: FrameType | None) -> WatchedRecording:
    """The context of a forward pass, called by this frame, whose step is watched."""
    return WatchedRecording(Watch(inputs, has_values([*module.parameters(), *inputs])), frame)


def has_values(tensors: Iterable[Tensor]) -> bool:
    """Whether none of the tensors is fake or on meta."""
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def _in_new_memory(results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> Any:
    """Hook on the node of a view that was written over: with real tensors, the node copies its gradient.

    With fake ones it returns a view of its gradient, which would then exist as long as the view.
    """
    with without_function_modes():
        ordinary = [tensor for tensor in gradients if tensor is not None and is_ordinary(tensor)]
        storages = {address(tensor.untyped_storage()) for tensor in ordinary}
        return tuple(
            result.new_empty_strided(result.shape, result.stride())
            if result is not None and is_ordinary(result) and address(result.untyped_storage()) in storages
            else result
            for result in results
        )
