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
from ...saved import is_ordinary
from ...torch_internals import dispatch_modes, node_number, push_dispatch_mode
from .costs import spec_of
from .counting import CountedRecording, Counting, RunOperator
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

    def __init__(self, inputs: Sequence[Tensor], measures: bool) -> None:
        super().__init__(inputs, measures)
        self.state = State.RUNS
        self.error: Exception | None = None  # that has ended the watch
        self.has_backward = False  # a backward pass has run through its graph
        self._handles: list[Any] = []  # of hooks on nodes and parameters

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
            self.events.append((Event.BUSY, len(self.operators)))
            self.operators.append(RunOperator(None, 0, 0, spec_of(start), _LOSS * start.nbytes))
        nodes = [node for node in nodes_of(tensors) if type(node).__name__ != "AccumulateGrad"]
        nodes = [node for node in nodes if node_number(node) >= self.storages.first_node_number]
        memories = [self.allocations.memory(tensor) for tensor in tensors if is_ordinary(tensor)]
        self.allocations.outputs = {memory for memory in memories if memory is not None}
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
        self.events += [(Event.LET, memory) for memory in self.allocations.outputs]
        self.end(State.COUNTED)


class WatchedRecording(CountedRecording):
    """Context of a forward pass of the program that is watched."""

    counting: Watch

    def end_if_abandoned(self) -> bool:
        is_abandoned = super().end_if_abandoned()
        if is_abandoned:  # by Ctrl-C
            self.leave_mode()
            self.counting.end(State.LOST)
        return is_abandoned
