"""One forward pass through reversible modules; see `steps` for what its backward pass does."""

import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.autograd.graph import Node

from .couplings import Coupling
from .saved import current_hooks
from .steps import Call, Regrouping, State, Step, Update, Values

_MARK = "reversible state"  # in the metadata of an output's node: its state, its position there, its version


class Pass:
    """One forward pass through reversible modules, and what its backward pass needs."""

    def __init__(self, inputs: Values, *, preserve_rng_state: bool = True, forget: bool = True):
        self.forget = forget  # False: an ordinary forward pass
        self.values = inputs
        self.state = (_state_of(inputs) if forget else None) or State()
        self.needed = False  # whether the last step needs the state after it
        self.halves_of: Coupling | None = None  # the values are its halves; None: as in the beginning
        self.options = (current_hooks() if forget else None, preserve_rng_state)

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
        if self.needed:
            self.state.keep(self.values, self.options[0])
            for position, tensor in enumerate(self.values):
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_MARK] = (weakref.ref(self.state), position, tensor._version)
        return self.values

    def _run(self, modules: Sequence[nn.Module], move: Update | Call) -> None:
        if not self.forget:
            self.values = move.run(self.values)
            return
        step = Step(modules, move, self.state, self.values, *self.options)
        self.values = step.run(self.values)
        self.state, self.needed = step.after, move.invertible

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
            self.state = Regrouping(back, self.state).after


def _state_of(values: Values) -> State | None:
    """The state that these tensors are the last values of, if they are untouched outputs of one reversible pass."""
    marks = [None if tensor.grad_fn is None else _metadata(tensor.grad_fn).get(_MARK) for tensor in values]
    found = [mark for mark in marks if mark is not None]
    if len(found) < len(values) or len({id(reference) for reference, *_ in found}) > 1:
        return None
    state = found[0][0]()
    untouched = [mark[1:] for mark in found] == [(place, tensor._version) for place, tensor in enumerate(values)]
    return state if state is not None and untouched and len(state.kept or ()) == len(values) else None


def _metadata(node: Node) -> dict:
    return node.metadata  # type: ignore[return-value]  # torch's hints take the property for a method
