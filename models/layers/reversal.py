"""One forward pass through reversible modules; see `steps` for what its backward pass does."""

import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.autograd.graph import Node

from .couplings import Coupling
from .saved import current_hooks
from .steps import Call, Regrouping, State, Step, Update, Values

_MARK = "reversible state"  # in the metadata of an output's node


class Pass:
    """One forward pass through reversible modules, and what its backward pass needs."""

    def __init__(self, inputs: Values, *, preserve_rng_state: bool = True, forget: bool = True):
        self.forget = forget  # False: an ordinary forward pass
        self.values = inputs
        self.state = (_state_of(inputs) if forget else None) or State()
        self.start: tuple[State, Step | Regrouping] | None = None  # the last state of another pass, and who follows it
        self.restores = False  # whether the last step restores the state before it, from the one after it
        self.halves_of: Coupling | None = None  # the values are its halves; None: as in the beginning
        self.hooks = current_hooks() if forget else None
        self.preserve_rng_state = preserve_rng_state

    def couple(self, coupling: Coupling) -> None:
        """Run a coupling."""
        self._split(coupling)
        if coupling.invertible:
            for half in coupling.half_steps():
                self._run([half.branch], Update(half))
        else:
            self._run([coupling], Call(coupling.couple))

    def uncouple(self, coupling: Coupling) -> None:
        """Run the inverse of a coupling."""
        self._split(coupling)
        for half in reversed(coupling.half_steps()):
            self._run([half.branch], Update(half.inverted()))

    def invert(self, module: nn.Module, function: Callable, inverse: Callable) -> None:
        """Run a function of a module that has an inverse."""
        self._join()
        self._run([module], Call(function, inverse))

    def keep_input(self, modules: Sequence[nn.Module], function: Callable) -> None:
        """Run a function of some modules, and keep its input instead of their activations."""
        self._join()
        self._run(modules, Call(function))

    def finish(self) -> Values:
        """The outputs; the last state is kept."""
        self._join()
        if self.start is not None:
            state, first = self.start
            state.leave_to(first)
        if self.restores:
            self.state.keep(self.values, self.hooks)
            self.state.outputs = [(weakref.ref(tensor), tensor._version) for tensor in self.values]
            for tensor in self.values:
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_MARK] = weakref.ref(self.state)
        return self.values

    def _run(self, modules: Sequence[nn.Module], move: Update | Call) -> None:
        if not self.forget:
            self.values = move.run(self.values)
            return
        step = Step(modules, move, self.state, self.values, self.hooks, self.preserve_rng_state)
        before, self.state.taken = self.state, True
        try:
            self.values = step.run(self.values)
        except BaseException:
            before.taken = False  # a second try may follow
            raise
        if move.invertible:
            self._follow(step)
        self.state, self.restores = step.after, move.invertible

    def _follow(self, step: Step | Regrouping) -> None:
        """Let a step restore the state before it. Another pass's last state stays kept until this pass succeeds."""
        if self.state.kept is None:
            self.state.leave_to(step)
        elif self.start is None:
            self.start = (self.state, step)

    def _split(self, coupling: Coupling) -> None:
        if self.halves_of is not None and self.halves_of.split_dim == coupling.split_dim:
            return
        self._join()
        self._regroup(lambda whole: coupling.split(*whole), lambda halves: (coupling.join(halves),))
        self.halves_of = coupling

    def _join(self) -> None:
        if self.halves_of is not None:
            coupling, self.halves_of = self.halves_of, None
            self._regroup(lambda halves: (coupling.join(halves),), lambda whole: coupling.split(*whole))

    def _regroup(self, function: Callable[[Values], Values], back: Callable[[Values], Values]) -> None:
        self.values = function(self.values)
        if self.forget:
            step = Regrouping(back, self.state)
            self._follow(step)
            self.state = step.after


def _state_of(values: Values) -> State | None:
    """The state that these tensors are the last values of, if they are the untouched outputs of one reversible pass."""
    marks = [_metadata(tensor.grad_fn).get(_MARK) for tensor in values if tensor.grad_fn is not None]
    state = marks[0]() if marks and marks[0] is not None else None
    if state is None or state.taken or len(state.outputs) != len(values):
        return None
    pairs = zip(state.outputs, values, strict=True)
    return state if all(ref() is tensor and version == tensor._version for (ref, version), tensor in pairs) else None


def _metadata(node: Node) -> dict:
    """A node's own dictionary, which lives as long as it; PyTorch's anomaly mode has other keys there."""
    return node.metadata  # type: ignore[return-value]  # torch's hints take the property for a method
