"""Watch a step of the program itself: the forward pass call by call, the backward pass node by node.

Nothing is copied or run twice. What autograd saves is held elsewhere until the backward pass reads it, so this step
takes less memory than later ones. An error of watching ends the watch, not the step.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial, wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...made_tensors import Change
from ...saved import Kept, copied, is_ordinary, modified
from ...torch_internals import (
    FakeTensor,
    OpOverload,
    dispatch_modes,
    next_node_number,
    node_number,
    packed_in,
    pop_dispatch_mode,
    push_dispatch_mode,
    without_function_modes,
)
from ..held.calls import Call
from ..held.elsewhere import SMALL, Elsewhere, Held
from ..table.rules import Rule
from .counting import ADD, Allocations, Counting, Recorded
from .dry import differentiable
from .step import Event
from .trace import nodes_of

_LOSS = 4  # times an output's bytes, which a mean square of it takes in the backward pass, besides its gradient


class State(Enum):
    """How far a watch has come."""

    RUNS = auto()  # the forward pass
    AWAITS = auto()  # the backward pass, or its end
    COUNTED = auto()  # the whole step
    LOST = auto()  # the forward pass has raised an error, or its graph is gone without a backward pass
    FAILED = auto()  # watching has raised an error


class HostMemoryError(RuntimeError):
    """What a watched step saves has no room in host memory."""


def _ends_watch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of watching end the watch instead of the program's step."""

    @wraps(method)
    def watched(watch: "Watch", *args: Any) -> Any:
        if not watch.is_over:
            try:
                return method(watch, *args)
            except Exception as error:
                watch.fail(error)
        return None

    return watched


class Watch(Counting):
    """Counts a step of the program: see the top of this file. `measures`: see `Counting`."""

    def __init__(self, inputs: Sequence[Tensor], measures: bool) -> None:
        super().__init__(inputs, measures, _Allocations)
        self.state = State.RUNS
        self.error: Exception | None = None  # that has ended the watch
        self.elsewhere = Elsewhere()
        self.has_backward = False  # a backward pass has run through its graph
        self._handles: list[Any] = []  # of hooks on nodes and parameters
        self._copies: dict[Any, Held | None] = {}  # by the places of their tensors, in the forward pass
        self._packs: dict[int, list[weakref.ref[Any]]] = {}  # by the numbers of their memories, in the forward pass
        self._exposed: set[int] = set()  # memories that the program may change unseen
        self.taken: set[int] = set()  # memories of gradients that a parameter has taken over
        self.outputs: set[int] = set()  # memories of outputs, which other steps may hold to their end
        self.gathered: set[int] = set()  # memories of parameters that FSDP has gathered
        self._arriving: dict[Tensor, tuple[bool, int | None, Any]] = {}  # parameters whose gradients come now
        self._comes: list[tuple[int, tuple[Event, int]]] = []  # see `Step.coming`; the first number: an event
        self._ends: list[int] = []  # memories of gradients that stay, if they come

    @property
    def is_over(self) -> bool:
        return self.state in (State.COUNTED, State.LOST, State.FAILED)

    def fail(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # its frames hold tensors
        self.end(State.FAILED)

    def end(self, state: State) -> None:
        """Stop watching. What is freed from now on is no event."""
        if not self.is_over:
            self.state, self.events = state, list(self.events)
            self.made.references.clear()
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._arriving.clear()
            self.elsewhere.close()

    # The forward pass

    def pack(self, tensor: Tensor) -> Any:
        with without_function_modes(), self.made.off():
            return Kept(tensor, None) if self.is_over else _Packed(tensor, self)

    @_ends_watch
    def note_saved(self, packed: "_Packed", tensor: Tensor) -> None:
        packed.saved, packed.number = self.holds(packed, tensor)

    @_ends_watch
    def note_read(self, save: int) -> None:
        self.reads(save)

    @_ends_watch
    def held_elsewhere(self, packed: "_Packed", tensor: Tensor) -> Held | None:
        """What autograd will read in place of a tensor; None: it stays, as what existed before the step does."""
        number = self.made.memory(tensor) if is_ordinary(tensor) else None
        if number is None or number in self._exposed:
            return None
        if tensor.is_meta or isinstance(tensor, FakeTensor):  # it has no values
            like = tensor.new_empty_strided(tensor.shape, tensor.stride())
            return Held(like, tensor.shape, tensor.stride(), tensor.device)
        key = number, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.nbytes < SMALL:
            held: Held | None = Held(copied(tensor), tensor.shape, tensor.stride(), tensor.device)
        elif key in self._copies:
            held = self._copies[key]
        else:
            held = self._copies[key] = self.elsewhere.held(tensor)
            if self.elsewhere.is_full:
                raise HostMemoryError(
                    "host memory has no room for what a watched step saves: recompute_activations(…, example=…) plans "
                    "by a dry step instead"
                )
        if held is not None:
            self._packs.setdefault(number, []).append(weakref.ref(packed))
        return held

    def read_as_pytorch(self, tensor: Tensor) -> None:
        super().read_as_pytorch(tensor)
        if (number := self.made.memory(tensor)) is not None:
            self._exposed.add(number)
            with self.made.off():
                for packed in [reference() for reference in self._packs.pop(number, ())]:
                    if packed is not None:
                        packed.read_memory(tensor)

    def leaves_forward(self) -> None:
        self.last_node = next_node_number()
        self._copies, self._packs = {}, {}

    @_ends_watch
    def awaits(self, network: nn.Module, outputs: Any) -> None:
        """Watch for the backward pass of the program, which begins at outputs of the network."""
        self.state = State.AWAITS
        self.called.append((self.last_node, "the loss", None))
        tensors = tensors_in(outputs)
        self.forward_ends(tensors)
        for start in differentiable(outputs):  # the loss is not seen: a mean square stands for it
            self.note_temporary(_LOSS * start.nbytes, start)
        nodes = [node for node in nodes_of(tensors) if type(node).__name__ != "AccumulateGrad"]
        nodes = [node for node in nodes if node_number(node) >= self.start]
        memories = [self.made.memory(tensor) for tensor in tensors if is_ordinary(tensor)]
        self.outputs = {number for number in memories if number is not None}
        self._handles = [node.register_prehook(self._node_runs) for node in nodes]
        for parameter in network.parameters():
            if parameter.requires_grad and parameter.is_leaf and is_ordinary(parameter):
                self._handles.append(parameter.register_hook(partial(self._gradient_comes, parameter)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_came))

    def is_awaited(self) -> bool:
        """Whether its graph exists, so that its backward pass, or the rest of it, may come."""
        return any(reference() is not None for reference in self.open)

    @_ends_watch
    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        super().decide(rule, call, result)

    @_ends_watch
    def note_overwritten(self, tensor: Tensor, before: int) -> None:
        super().note_overwritten(tensor, before)

    # The backward pass

    @_ends_watch
    def _node_runs(self, gradients: Sequence[Tensor | None]) -> None:
        """Before a node runs: see what it does. The engine drops this mode after the node, and its additions."""
        if torch.is_grad_enabled():  # it makes a graph of its own, as for a penalty on gradients
            return
        self.enters_pass()
        if self.made not in dispatch_modes():
            push_dispatch_mode(self.made)
        for gradient in gradients:
            if gradient is not None and is_ordinary(gradient) and self.made.number(gradient) is None:
                self.made.add(gradient.untyped_storage())

    @_ends_watch
    def _gradient_comes(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if self.in_pass and gradient is not None and is_ordinary(gradient):
            self._arriving[parameter] = parameter.grad is not None, self.made.memory(gradient), gradient.stride()

    @_ends_watch
    def _gradient_came(self, parameter: Tensor) -> None:
        if parameter not in self._arriving or parameter.grad is None:
            return
        was_there, memory, stride = self._arriving.pop(parameter)
        gradient = parameter.grad
        is_copy = memory is None or stride != gradient.stride()
        if not (was_there or is_copy) and is_ordinary(gradient):
            is_copy = self.made.memory(gradient) != memory
        self.gradient_bytes += gradient.nbytes
        if is_copy:
            self.sizes.append(gradient.nbytes)
            self._comes.append((len(self.events), (Event.HOLD, len(self.sizes) - 1)))
            self.events.append((Event.BUSY, -1))
            return
        self.made.note_operator(ADD, (gradient, gradient), {}, gradient)  # it is added to one that is there
        self.note_place(ADD)
        if was_there:
            self._ends += [] if memory is None else [memory]
        elif memory is not None:
            self.taken.add(memory)
            self._comes.append((len(self.events), (Event.BUSY, 0)))
            self.events.append((Event.LET, memory))

    @_ends_watch
    def backward_ends(self) -> None:
        super().backward_ends()
        self.has_backward = True
        if not self.is_awaited():
            self.concludes()

    def concludes(self) -> None:
        """The step has ended, or the rest of its graph will not run."""
        self.events += [(Event.LET, memory) for memory in self.outputs]
        self.outputs = set()
        self.end(State.COUNTED)

    def _coming(self, events: list[tuple[Event, int]]) -> list[tuple[int, tuple[Event, int]]]:
        ends = {what: now for now, (event, what) in enumerate(events) if event == Event.LET}
        return [*self._comes, *((ends[memory], (Event.BUSY, 0)) for memory in self._ends if memory in ends)]


class _Packed(Kept):
    """What autograd holds in a watched step: the tensor as it is, or a copy elsewhere."""

    __slots__ = ("_held", "_offset", "_tensor", "_watch", "number", "saved")

    def __init__(self, tensor: Tensor, watch: Watch):
        self.saved: Any = None  # what a recorder gives autograd
        self.number = -1  # of the save
        self._watch = watch
        watch.note_saved(self, tensor)
        self._held = watch.held_elsewhere(self, tensor)
        if self._held is None:
            super().__init__(tensor, None)
            return
        self.hooks, self.version = None, tensor._version
        self._tensor, self._offset = weakref.ref(tensor), tensor.storage_offset()
        self.packed = tensor.detach()
        self.packed.data = tensor.new_empty(0)  # keeps the version counter, but not the memory

    def read_memory(self, sharing: Tensor) -> None:
        """Read the tensor itself from now on, as PyTorch does. `sharing`: another one in its memory."""
        if (held := self._held) is not None:
            tensor = self._tensor()
            if tensor is None:
                super().__init__(sharing.detach().as_strided(held.shape, held.stride, self._offset), None)
            else:
                is_own = any(packed is self for packed in packed_in(tensor.grad_fn))
                super().__init__(tensor, None, detaches=is_own)
            self._held = None

    def get(self) -> Tensor:
        self._watch.note_read(self.number)
        if self._held is None:
            return super().get()
        with without_function_modes(), self._watch.made.off():
            tensor = self._held.get()
        if self.packed._version != self.version:
            raise modified(self.name, tensor, self.packed._version, self.version)
        return tensor


class _Allocations(Allocations):
    """The allocations of a watched step. Outside of the watch, it only passes operators on."""

    counting: Watch
    result: tuple[Any, ...] = ()  # of the running operator, once it has run

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counting.is_over:
            return function(*args, **(kwargs or {}))
        self.result = ()
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        except Exception as error:
            if not self.result:  # the operator has raised it
                raise
            self.counting.fail(error)
            return self.result[0]
        finally:
            self.result = ()

    def call(self, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        self.result = (super().call(function, args, kwargs),)
        return self.result[0]

    def memory(self, tensor: Tensor) -> int | None:
        """As for any step, but a parameter that FSDP has gathered existed before it: FSDP frees its memory unseen."""
        number = super().memory(tensor)
        if number is not None and (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
            self.counting.sizes[number] = 0
            self.counting.gathered.add(number)
        return None if number in self.counting.gathered else number

    def note(self, change: Change) -> None:
        memory = self.memories[change.number] if change.bytes < 0 else -1
        if memory in self.counting.taken:
            self.counting.taken.discard(memory)
            self.changes.append(change)
        elif memory in self.counting.outputs:
            self.changes.append(change)
        else:
            super().note(change)


class Watched(Recorded):
    """Context of a forward pass of the program that is watched. `frame`: see `Recording`."""

    counting: Watch

    def __init__(self, watch: Watch, frame: FrameType | None) -> None:
        super().__init__(watch)
        self.frame = frame

    def __enter__(self) -> "Watched":
        # Entering the mode would set a flag of all threads, for which compiled blocks are skipped.
        push_dispatch_mode(self.counting.made)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.counting.leaves_forward()
        self._leave_mode()

    def forget(self, has_raised: bool) -> None:
        super().forget(has_raised)
        here = "held elsewhere: this step is watched"
        self.kept = [one if one.made_by == "input" else one._replace(why=here) for one in self.kept]

    def _leave_mode(self) -> None:
        if dispatch_modes()[-1:] == [self.counting.made]:
            pop_dispatch_mode()

    def is_abandoned(self) -> bool:
        if is_abandoned := super().is_abandoned():  # by Ctrl-C
            self._leave_mode()
            self.counting.end(State.LOST)
        return is_abandoned
