"""How reversible modules forget their inputs: a chain of steps that the backward pass walks from the last output.

The values between two steps are a `_State`, and only the last one is kept. When the backward pass asks for an
activation of a step, the step's branch runs again; this fills all its activations (see `Section`) and restores the
state before. A training step then costs four forward passes instead of three (RevNet, Algorithm 1 and section 3.2).

References go one way, from a step to the state after it and from a state to the step that follows. So everything is
freed with the graph, and a state that no earlier step needs is gone before anybody restores it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .couplings import Coupling, HalfStep, detached
from .replay import Environment, Section, keeps_graph, statistics_kept
from .saved import Hooks, Kept, current_hooks

Values = tuple[Tensor, ...]
Undo = Callable[[], Values]

_MARK = "reversible state"  # in the metadata of an output's node: its state, its position there, its version


class Pass:
    """One forward pass through reversible modules, and what its backward pass needs."""

    def __init__(self, inputs: Values, *, preserve_rng_state: bool = True, forget: bool = True):
        self.forget = forget  # False: an ordinary forward pass
        self.values = inputs
        self.state = (_state_of(inputs) if forget else None) or _State()
        self.needed = False  # whether the last step needs the state after it
        self.halves_of: Coupling | None = None  # the values are its halves; None: as in the beginning
        self.options = (current_hooks() if forget else None, preserve_rng_state)

    def couple(self, coupling: Coupling) -> None:
        """Run a coupling."""
        self._split(coupling)
        if coupling.invertible:
            for half in coupling.half_steps():
                self._run(half.branch, _Update(half))
        else:
            self._run(coupling, _Call(coupling.couple))

    def uncouple(self, coupling: Coupling) -> None:
        """Run the inverse of a coupling."""
        self._split(coupling)
        for half in reversed(coupling.half_steps()):
            self._run(half.branch, _Update(half.inverted()))

    def invert(self, module: nn.Module, function: Callable, inverse: Callable) -> None:
        """Run a function of a module that has an inverse."""
        self._join()
        self._run(module, _Call(function, inverse))

    def keep_input(self, module: nn.Module, function: Callable) -> None:
        """Run a function of a module, and keep its input instead of its activations."""
        self._join()
        self._run(module, _Call(function))

    def finish(self) -> Values:
        """The outputs; the last state is kept."""
        self._join()
        if self.needed:
            self.state.keep(self.values, self.options[0])
            for position, tensor in enumerate(self.values):
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_MARK] = (weakref.ref(self.state), position, tensor._version)
        return self.values

    def _run(self, module: nn.Module, move: _Update | _Call) -> None:
        if not self.forget:
            self.values = move.run(self.values)
            return
        step = _Step(module, move, self.state, self.values, *self.options)
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
            self.state = _Regrouping(back, self.state).after


class _State:
    """The values between two steps: kept, or restored by the step that follows."""

    def __init__(self) -> None:
        self.kept: tuple[Kept, ...] | None = None
        self.restored: Values | None = None
        self.following: _Step | _Regrouping | None = None

    def keep(self, values: Values, hooks: Hooks | None) -> None:
        if self.kept is None:
            self.kept = tuple(Kept(tensor, hooks) for tensor in values)

    def leave_to(self, step: _Step | _Regrouping) -> None:
        """From now on the step that follows restores the values."""
        self.following, self.kept = step, None

    def take(self) -> Values:
        """The values, without a graph. Restored ones are given away. RuntimeError if the graph was freed."""
        steps = []
        state = self
        while state.kept is None and state.restored is None:
            if state.following is None:
                raise RuntimeError(
                    "a reversible module was differentiated a second time after its graph was freed: give "
                    "retain_graph=True to the first backward pass"
                )
            steps.append(state.following)
            state = state.following.after
        for step in reversed(steps):
            step.restore()
        if self.kept is not None:
            return tuple(kept.get().detach() for kept in self.kept)
        assert self.restored is not None
        values, self.restored = self.restored, None
        return values

    def give(self, values: Values) -> None:
        """Restore the values. Without retain_graph nobody asks the following step again."""
        self.restored = tuple(tensor.detach() for tensor in values)
        if not keeps_graph():
            self.following = None


class _Update(NamedTuple):
    """One half of a coupling. Its branch runs once in the backward pass, for both purposes."""

    half: HalfStep
    invertible: bool = True

    def run(self, streams: Values) -> Values:
        return self.half.run(streams)

    def again(self, streams: Values, like: Inputs) -> Undo:
        """Run the branch on the streams after the update."""
        half, target = self.half, self.half.target
        streams = like(streams)
        output = half.output(streams)

        def undone() -> Values:
            with torch.no_grad():
                values = half.undo(streams[target].detach(), detached(output))
            return half.replaced(streams, values.to(like.dtypes[target]))

        if half.combine_saves:  # a product saves its factors
            half.combine(like(undone())[target], output)
        return undone


class _Call(NamedTuple):
    """A function of some tensors, with its inverse if it has one: the backward pass inverts it, and runs it again."""

    function: Callable
    inverse: Callable | None = None

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def run(self, values: Values) -> Values:
        return as_tuple(self.function(*values))

    def again(self, values: Values, like: Inputs) -> Undo:
        """Run the function again: on the values, or on their inverse if there is one."""
        if self.inverse is not None:
            with torch.no_grad():
                values = as_tuple(self.inverse(*values))
        self.function(*like(values))
        return lambda: values


class Inputs(NamedTuple):
    """What the inputs of a forward pass were like."""

    dtypes: tuple[torch.dtype, ...]
    require_grad: tuple[bool, ...]

    def __call__(self, values: Values) -> Values:
        """Leaves like them: a repeated forward pass then saves what the first one did."""
        return tuple(
            tensor.detach().requires_grad_(needed) for tensor, needed in zip(values, self.require_grad, strict=True)
        )


class _Step:
    """One executed step. It runs again from the state after it, or from the one before if that cannot be restored."""

    def __init__(
        self,
        module: nn.Module,
        move: _Update | _Call,
        before: _State,
        inputs: Values,
        hooks: Hooks | None,
        preserve_rng_state: bool,
    ):
        self.module, self.move = module, move
        self.inputs = Inputs(tuple(x.dtype for x in inputs), tuple(x.requires_grad for x in inputs))
        self.environment = Environment(inputs, preserve_rng_state)
        self.section = Section()
        self.before = weakref.ref(before)
        self.after = _State()
        if move.invertible:
            before.leave_to(self)
            self.source = self.after
        else:
            before.keep(inputs, hooks)
            self.source = before

    def run(self, values: Values) -> Values:
        """The forward pass."""
        with self.section.dropping(self.repeat):
            outputs = self.move.run(values)
        self.environment.forget_unused_random_numbers()
        return outputs

    def repeat(self) -> None:
        """Fill the section, and restore the state before."""
        self._again(self.section.recording())

    def restore(self) -> None:
        """Restore the state before."""
        self._again(self.section.recording() if self.section.is_asked_for() else torch.no_grad())

    def _again(self, context: AbstractContextManager) -> None:
        values = self.source.take()
        with self.environment.restored(), statistics_kept(self.module), context:
            undo = self.move.again(values, self.inputs)
        before = self.before()
        if before is not None and self.move.invertible:
            before.give(undo())


class _Regrouping:
    """Halves from one tensor, or one tensor from halves."""

    def __init__(self, back: Callable[[Values], Values], before: _State):
        self.back = back
        self.before = weakref.ref(before)
        self.after = _State()
        before.leave_to(self)

    def restore(self) -> None:
        """Restore the state before."""
        before, values = self.before(), self.after.take()
        if before is not None:
            before.give(self.back(values))


def _state_of(values: Values) -> _State | None:
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


def as_tuple(outputs: Tensor | Values) -> Values:
    """The outputs of a module, as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
