"""How reversible modules forget their inputs: a chain of steps that the backward pass walks from the last output.

The rules, which this file keeps together with replay.py and environment.py:

1. The chain. A `Pass` is one forward pass. In it a `State`, the values between two steps, alternates with a `Step`
   (half a coupling, or a whole function) or a `Regrouping` (of a tensor into halves, or back).
2. Who keeps. The input of each step without an inverse is kept, and the last state of a pass if its last step has one.
   A pass that starts from the unmodified outputs of another with such a step continues its chain. When it has
   succeeded, the earlier last state is dropped.
3. Who asks. Each tensor but parameters that autograd would save in a step gets an empty slot in the step's `Section`.
   The first slot that the backward pass reads makes the step repeat: from the state after it, or from its kept input.
4. Who computes. A repetition of a half-step runs its branch once, for two purposes: it fills all slots of the section,
   and restores the state before the step (RevNet, Algorithm 1 and section 3.2). Other steps run their inverse, and then
   their function. If the state after a step is gone, the steps that follow restore it first, from the end
   (`State.take`). So a training step costs four forward passes with couplings, three with stored activations.
5. Who forgets. Restored values are given away with the first `take`. Autograd frees each slot with its node. With
   retain_graph=True a slot is only emptied, and the next backward pass computes everything again.
6. Lifetimes. References lead one way: from slots to their step, from a step to the state after it, and from a state to
   the step that follows. A step knows the state before it by a weak reference (but holds it if it has no inverse), so
   the chain is freed with the graph, and a state that no earlier step needs any more is not restored.
7. What a repetition finds. `Environment` restores autocast, modes, buffers and (with `preserve_rng_state`) random
   numbers. It refuses parameters that were modified or replaced since, and buffers that the forward pass left alone.
   Running statistics do not move again. The repetition must save tensors of the same number, shapes, dtypes and
   devices as the first run, or it raises an error.
8. What may never happen: a gradient of other values than the forward pass had, except for rounding. A function that
   writes over its input is refused. A kept tensor that was modified raises PyTorch's error about an in-place operation.
   Whatever is asked for when the graph is freed, or still inside the forward pass, raises an error that says so. That
   branches compute the same again is a precondition, which `checking_repetitions` checks (checks.py).
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..saved import Kept
from ..torch_internals import Hooks, current_hooks, keeps_graph
from .checks import Checksum
from .couplings import Coupling, HalfStep, detached, versions
from .environment import Environment
from .replay import Section

Values = tuple[Tensor, ...]
Undo = Callable[[], Values]


class State:
    """The values between two steps: kept, or restored by the step that follows.

    `taken`: a step follows already. Another step that starts from the same tensors begins a chain of its own.
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
        """The values, detached; restored ones are forgotten here. RuntimeError if the graph was freed."""
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
        """Restore the values. Without retain_graph=True the following step is no longer needed."""
        self.restored = tuple(tensor.detach() for tensor in values)
        if not keeps_graph():
            self.following = None


class Inputs(NamedTuple):
    """The dtypes and strides of a step's inputs, and which of them required a gradient."""

    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...], ...]
    require_grad: tuple[bool, ...]

    def __call__(self, values: Values, any_layout: int | None = None) -> Values:
        """New leaves that require gradients as the inputs did, so that a repetition saves the same tensors.

        Their strides are the inputs' too, by which operators may choose what they save (`F.linear`); except for those
        of the number `any_layout`, which no branch reads.
        """
        leaves = []
        for number, (tensor, strides, needed) in enumerate(zip(values, self.strides, self.require_grad, strict=True)):
            if number != any_layout and tensor.stride() != strides:
                tensor = _laid_out(tensor, strides)
            leaves.append(tensor.detach().requires_grad_(needed))
        return tuple(leaves)


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides; values are equal along dimensions of stride 0."""
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    copy = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor.as_strided(sizes, tensor.stride()))
    return copy.expand(tensor.shape)


class Update(NamedTuple):
    """One half of a coupling. Its branch runs once in the backward pass, to fill the section and to undo the update."""

    half: HalfStep
    invertible: bool = True

    def run(self, streams: Values, checksum: Checksum) -> Values:
        output = self.half.output(streams)
        checksum.see(output)
        return self.half.replaced(streams, self.half.combine(streams[self.half.target], output))

    def again(self, streams: Values, like: Inputs, checksum: Checksum) -> Undo:
        """Run the branch on the streams after the update."""
        half, target = self.half, self.half.target
        streams = like(streams, any_layout=target)
        output = half.output(streams)
        checksum.see(output)

        def undone() -> Values:
            with torch.no_grad():
                values = half.undo(streams[target].detach(), detached(output))
            return half.replaced(streams, _as(values, like.dtypes[target]))

        if half.combine_saves:  # a product saves its factors
            half.combine(like(undone(), any_layout=target)[target], output)
        return undone


class Apply(NamedTuple):
    """A function of some tensors. The backward pass applies its inverse, if it has one, and runs the function again."""

    function: Callable
    inverse: Callable | None = None

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def run(self, values: Values, checksum: Checksum) -> Values:
        outputs = _unchanged(self.function, values)
        checksum.see(outputs)
        return outputs

    def again(self, values: Values, like: Inputs, checksum: Checksum) -> Undo:
        """Run the function again: on `values`, which are its kept inputs, or outputs to invert."""
        if self.inverse is not None:
            with torch.no_grad():
                values = _unchanged(self.inverse, values)
                values = tuple(_as(tensor, dtype) for tensor, dtype in zip(values, like.dtypes, strict=True))
        checksum.see(self.function(*like(values)))
        return lambda: values


class Step:
    """One executed step. It repeats from the state after it, or from its kept input if it has no inverse."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        move: Update | Apply,
        before: State,
        inputs: Values,
        hooks: Hooks | None,
        preserve_rng_state: bool,
    ):
        self.move = move
        self.inputs = Inputs(*zip(*((x.dtype, x.stride(), x.requires_grad) for x in inputs), strict=True))
        self.environment = Environment(modules, inputs, preserve_rng_state)
        self.section = Section()
        self.checksum = Checksum(modules)
        self.before = weakref.ref(before)
        self.after = State()
        if not move.invertible:
            before.keep(inputs, hooks)
        self.source = self.after if move.invertible else before

    def run(self, values: Values) -> Values:
        """The forward pass."""
        with self.section.dropping(self.repeat):
            outputs = self.move.run(values, self.checksum)
        self.environment.forward_pass_ended()
        return outputs

    def repeat(self) -> None:
        """Fill the section, and restore the state before."""
        self._again(self.section.filling())

    def restore(self) -> None:
        """Restore the state before."""
        self._again(self.section.filling() if self.section.is_asked_for() else torch.no_grad())

    def _again(self, context: AbstractContextManager) -> None:
        values = self.source.take()
        with self.environment.restored(), context:
            undo = self.move.again(values, self.inputs, self.checksum)
        before = self.before()
        if before is not None and self.move.invertible:
            before.give(undo())


class Regrouping:
    """A tensor split into halves, or halves joined to a tensor. `back` does the opposite."""

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
    """Restored values in the original dtype; integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.round().to(dtype)


_MARK = "reversible state"  # in the metadata of an output's node


class Pass:
    """One forward pass through reversible modules, and the chain that its backward pass walks."""

    def __init__(self, inputs: Values, *, preserve_rng_state: bool = True, forget: bool = True):
        self.forget = forget  # False: an ordinary forward pass
        self.values = inputs
        self.state = (_state_of(inputs) if forget else None) or State()
        self.start: tuple[State, Step | Regrouping] | None = None  # the earlier pass's last state, and our first step
        self.restores = False  # whether the last step has an inverse, and so needs the state after it
        self.halves_of: Coupling | None = None  # the coupling whose halves the values are; None: they are whole
        self.hooks = current_hooks() if forget else None
        self.preserve_rng_state = preserve_rng_state

    def couple(self, coupling: Coupling) -> None:
        """Run a coupling."""
        self._split(coupling)
        if coupling.invertible:
            for half in coupling.half_steps():
                self._run([half.branch], Update(half))
        else:
            self._run([coupling], Apply(coupling.couple))

    def uncouple(self, coupling: Coupling) -> None:
        """Run the inverse of a coupling."""
        self._split(coupling)
        for half in reversed(coupling.half_steps()):
            self._run([half.branch], Update(half.inverted()))

    def invert(self, module: nn.Module, function: Callable, inverse: Callable) -> None:
        """Run a function of a module that has an inverse."""
        self._join()
        self._run([module], Apply(function, inverse))

    def keep_input(self, modules: Sequence[nn.Module], function: Callable) -> None:
        """Run a function of some modules, and keep its input instead of their activations."""
        self._join()
        self._run(modules, Apply(function))

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

    def _run(self, modules: Sequence[nn.Module], move: Update | Apply) -> None:
        if not self.forget:
            self.values = move.run(self.values, Checksum([]))
            return
        step = Step(modules, move, self.state, self.values, self.hooks, self.preserve_rng_state)
        before, self.state.taken = self.state, True
        try:
            self.values = step.run(self.values)
        except BaseException:  # Ctrl-C as well
            before.taken = False  # a second try may follow
            raise
        if move.invertible:
            self._follow(step)
        self.state, self.restores = step.after, move.invertible

    def _follow(self, step: Step | Regrouping) -> None:
        """Let a step restore the state before it. An earlier pass's last state stays kept until this pass succeeds."""
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
    """The earlier pass's last state, if these are its unmodified outputs."""
    marks = [_metadata(tensor.grad_fn).get(_MARK) for tensor in values if tensor.grad_fn is not None]
    state = marks[0]() if marks and marks[0] is not None else None
    if state is None or state.taken or len(state.outputs) != len(values):
        return None
    pairs = zip(state.outputs, values, strict=True)
    return state if all(ref() is tensor and version == tensor._version for (ref, version), tensor in pairs) else None


def _metadata(node: Node) -> dict:
    """A node's own dictionary, which lives as long as the node. PyTorch's anomaly mode uses other keys of it."""
    return node.metadata  # type: ignore[return-value]  # torch's hints take the property for a method
