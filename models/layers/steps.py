"""How reversible modules forget their inputs: a chain of steps that the backward pass walks from the last output.

The values between two steps are a `State`, and only the last one is kept. When the backward pass asks for an
activation of a step, the step's branch runs again; this fills all its activations (see `Section`) and restores the
state before. A training step then costs four forward passes instead of three (RevNet, Algorithm 1 and section 3.2).

References go one way, from a step to the state after it and from a state to the step that follows. So everything is
freed with the graph, and a state that no earlier step needs is gone before anybody restores it.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .couplings import HalfStep, detached, versions
from .environment import Environment
from .replay import Section, keeps_graph
from .saved import Hooks, Kept

Values = tuple[Tensor, ...]
Undo = Callable[[], Values]


class State:
    """The values between two steps: kept, or restored by the step that follows.

    `taken`: a step follows; a second one that starts from the same tensors is no part of the chain.
    """

    def __init__(self) -> None:
        self.kept: tuple[Kept, ...] | None = None
        self.restored: Values | None = None
        self.following: Step | Regrouping | None = None
        self.taken = False
        self.outputs: list[tuple[weakref.ref[Tensor], int]] = []  # of the pass that ends here, with their versions

    def keep(self, values: Values, hooks: Hooks | None) -> None:
        if self.kept is None:
            self.kept = tuple(Kept(tensor, hooks, "an input or output of a reversible module") for tensor in values)

    def leave_to(self, step: "Step | Regrouping") -> None:
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
        values = self.restored
        if self.following is not None or not keeps_graph():
            self.restored = None
        return values

    def give(self, values: Values) -> None:
        """Restore the values. Without retain_graph nobody asks the following step again."""
        self.restored = tuple(tensor.detach() for tensor in values)
        if not keeps_graph():
            self.following = None


class Inputs(NamedTuple):
    """What the inputs of a forward pass were like."""

    dtypes: tuple[torch.dtype, ...]
    require_grad: tuple[bool, ...]

    def __call__(self, values: Values) -> Values:
        """Leaves like them: a repeated forward pass then saves what the first one did."""
        return tuple(
            tensor.detach().requires_grad_(needed) for tensor, needed in zip(values, self.require_grad, strict=True)
        )


class Update(NamedTuple):
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
            return half.replaced(streams, _as(values, like.dtypes[target]))

        if half.combine_saves:  # a product saves its factors
            half.combine(like(undone())[target], output)
        return undone


class Call(NamedTuple):
    """A function of some tensors, with its inverse if it has one: the backward pass inverts it, and runs it again."""

    function: Callable
    inverse: Callable | None = None

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def run(self, values: Values) -> Values:
        return _unchanged(self.function, values)

    def again(self, values: Values, like: Inputs) -> Undo:
        """Run the function again: on the values, or on their inverse if there is one."""
        if self.inverse is not None:
            with torch.no_grad():
                values = _unchanged(self.inverse, values)
                values = tuple(_as(tensor, dtype) for tensor, dtype in zip(values, like.dtypes, strict=True))
        self.function(*like(values))
        return lambda: values


class Step:
    """One executed step. It runs again from the state after it, or from the one before if that cannot be restored."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        move: Update | Call,
        before: State,
        inputs: Values,
        hooks: Hooks | None,
        preserve_rng_state: bool,
    ):
        self.move = move
        self.inputs = Inputs(tuple(x.dtype for x in inputs), tuple(x.requires_grad for x in inputs))
        self.environment = Environment(modules, inputs, preserve_rng_state)
        self.section = Section()
        self.before = weakref.ref(before)
        self.after = State()
        if not move.invertible:
            before.keep(inputs, hooks)
        self.source = self.after if move.invertible else before

    def run(self, values: Values) -> Values:
        """The forward pass."""
        with self.section.dropping(self.repeat):
            outputs = self.move.run(values)
        self.environment.forward_pass_ended()
        return outputs

    def repeat(self) -> None:
        """Fill the section, and restore the state before."""
        self._again(self.section.recording())

    def restore(self) -> None:
        """Restore the state before."""
        self._again(self.section.recording() if self.section.is_asked_for() else torch.no_grad())

    def _again(self, context: AbstractContextManager) -> None:
        values = self.source.take()
        with self.environment.restored(), context:
            undo = self.move.again(values, self.inputs)
        before = self.before()
        if before is not None and self.move.invertible:
            before.give(undo())


class Regrouping:
    """Halves from one tensor, or one tensor from halves."""

    def __init__(self, back: Callable[[Values], Values], before: State):
        self.back = back
        self.before = weakref.ref(before)
        self.after = State()

    def restore(self) -> None:
        """Restore the state before."""
        before, values = self.before(), self.after.take()
        if before is not None:
            before.give(self.back(values))


def as_tuple(outputs: Tensor | Values) -> Values:
    """The outputs of a module, as a tuple. ValueError if they are no tensors."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if not found:
        raise ValueError("a reversible module got or returned nothing: expected tensors")
    for output in found:
        if not isinstance(output, Tensor):
            raise ValueError(f"a reversible module got or returned a {type(output).__name__}: expected tensors")
    return found


def _unchanged(function: Callable, values: Values) -> Values:
    """function(*values), as a tuple. ValueError if it wrote over its input, which the chain still needs."""
    before = versions(values)
    outputs = as_tuple(function(*values))
    if versions(values) != before:
        raise ValueError(
            f"{getattr(function, '__qualname__', type(function).__name__)} wrote over its input, which a reversible "
            f"module still needs: let it begin with an operation that is not inplace"
        )
    return outputs


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Restored values in the dtype of the true ones: integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.round().to(dtype)
