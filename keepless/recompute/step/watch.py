"""Watch a step of the program itself: the forward pass call by call, the backward pass node by node.

Nothing is copied or run twice. What autograd saves is held elsewhere until the backward pass reads it, so this step
takes less memory than later ones. An error of watching ends the watch, not the step.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...made_tensors import Change
from ...saved import is_ordinary
from ...torch_internals import OpOverload, dispatch_modes, node_number, pop_dispatch_mode, push_dispatch_mode
from .counting import Allocations, CountedRecording, Counting
from .dry import differentiable
from .step import Event
from .trace import ends_watch, nodes_of

_LOSS = 4  # times an output's bytes, which a mean square of it takes in the backward pass, besides its gradient


class State(Enum):
    """How far a watch has come."""

    RUNS = auto()  # the forward pass
    AWAITS = auto()  # the backward pass, or its end
    COUNTED = auto()  # the whole step
    LOST = auto()  # the forward pass has raised an error, or its graph is gone without a backward pass
    FAILED = auto()  # watching has raised an error


class Watch(Counting):
    """Counts a step of the program: see the top of this file. `measures`: see `Counting`."""

    sets_gradients_aside = False

    def __init__(self, inputs: Sequence[Tensor], measures: bool) -> None:
        super().__init__(inputs, measures, _Allocations)
        self.state = State.RUNS
        self.error: Exception | None = None  # that has ended the watch
        self.has_backward = False  # a backward pass has run through its graph
        self._handles: list[Any] = []  # of hooks on nodes and parameters
        self.outputs: set[int] = set()  # memories of outputs, which other steps may hold to their end
        self.gathered: set[int] = set()  # memories of parameters that FSDP has gathered

    def fail(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # its frames hold tensors
        self.end(State.FAILED)

    def end(self, state: State) -> None:
        """Stop watching. What is freed from now on is no event."""
        if not self.is_over:
            self.state = state
            self.is_over = True
            self.events = list(self.events)
            self.allocations.alive.clear()
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self.arriving.clear()
            self.elsewhere.close()

    @ends_watch
    def await_backward(self, network: nn.Module, outputs: Any) -> None:
        """Watch for the backward pass of the program, which begins at outputs of the network."""
        self.state = State.AWAITS
        tensors = tensors_in(outputs)
        self.forward_ends(tensors)
        for start in differentiable(outputs):  # the loss is not seen: a mean square stands for it
            self.note_temporary(_LOSS * start.nbytes, start)
        nodes = [node for node in nodes_of(tensors) if type(node).__name__ != "AccumulateGrad"]
        nodes = [node for node in nodes if node_number(node) >= self.storages.first_node_number]
        memories = [self.allocations.memory(tensor) for tensor in tensors if is_ordinary(tensor)]
        self.outputs = {number for number in memories if number is not None}
        self._handles = [node.register_prehook(self._node_runs) for node in nodes]
        self._handles += self.watch_gradients(network.parameters())

    def is_awaited(self) -> bool:
        """Whether its graph exists, so that its backward pass, or the rest of it, may come."""
        return any(reference() is not None for reference in self.open_saves)

    # The backward pass

    @ends_watch
    def _node_runs(self, gradients: Sequence[Tensor | None]) -> None:
        """Before a node runs: see what it does. The engine drops this mode after the node, and its additions."""
        if torch.is_grad_enabled():  # it makes a graph of its own, as for a penalty on gradients
            return
        self.enter_pass()
        if self.allocations not in dispatch_modes():
            push_dispatch_mode(self.allocations)
        for gradient in gradients:
            if gradient is not None and is_ordinary(gradient) and self.allocations.number_of(gradient) is None:
                self.allocations.count_storage(gradient.untyped_storage())

    def gradient_comes(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if self.in_pass:
            super().gradient_comes(parameter, gradient)

    @ends_watch
    def backward_ends(self) -> None:
        super().backward_ends()
        self.has_backward = True
        if not self.is_awaited():
            self.conclude()

    def conclude(self) -> None:
        """The step has ended, or the rest of its graph will not run."""
        self.events += [(Event.LET, memory) for memory in self.outputs]
        self.outputs = set()
        self.end(State.COUNTED)


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
        if change.bytes < 0 and self.memories[change.number] in self.counting.outputs:
            self.changes.append(change)
        else:
            super().note(change)


class WatchedRecording(CountedRecording):
    """Context of a forward pass of the program that is watched."""

    counting: Watch

    def __enter__(self) -> "WatchedRecording":
        # Entering the mode would set a flag of all threads, for which compiled blocks are skipped.
        push_dispatch_mode(self.counting.allocations)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._leave_mode()

    def forget(self, has_raised: bool) -> None:
        super().forget(has_raised)
        why = "held elsewhere: this step is watched"
        self.kept = [row if row.made_by == "input" else row._replace(why=why) for row in self.kept]

    def _leave_mode(self) -> None:
        if dispatch_modes()[-1:] == [self.counting.allocations]:
            pop_dispatch_mode()

    def end_if_abandoned(self) -> bool:
        is_abandoned = super().end_if_abandoned()
        if is_abandoned:  # by Ctrl-C
            self._leave_mode()
            self.counting.end(State.LOST)
        return is_abandoned
