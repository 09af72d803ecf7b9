"""The chain of steps by which reversible modules do without stored inputs: backward walks it from the last output.

The rules, which this file implements together with replay.py, environment.py and state.py:

1. The chain. A `Pass` is one forward pass. It consists of `Step`s (half a coupling, or a whole function) and
   `Regrouping`s (of a tensor into halves, or back). A `Boundary` between two of them stands for the values there.
2. Kept values. A step without an inverse keeps its input. A pass keeps its outputs if its last step has an inverse. If
   a later pass starts from these unmodified outputs, it continues the chain; once it has succeeded, they are dropped.
3. Slots. Each tensor that autograd would save in a step becomes an empty slot in the step's `Section`, except for
   parameters. The first slot that the backward pass reads makes the step repeat: from the values after it, or from its
   kept input.
4. Repetition. A half-step runs its branch once, which fills all slots and restores the values before the step (RevNet,
   Algorithm 1 and section 3.2). Other steps run their inverse, and then their function. If the values after a step are
   gone, the later steps restore them first, from the end (`Boundary.take`). So a training step costs four forward
   passes with couplings, three with stored activations.
5. Restored values are handed over by the first `take` and not cached. Autograd frees each slot with its node. With
   retain_graph=True a slot is only emptied, and the next backward pass computes everything again.
6. Lifetimes. References point one way: from slots to their step, from a step to the boundary after it, and from a
   boundary to the step that follows. A step without an inverse also refers to the boundary before it; other steps only
   weakly. So the chain is freed with the graph, and values that no earlier step needs are not restored.
7. Environment. A repetition runs with the autocast settings, modes, and (with `preserve_rng_state`) random numbers of
   the first run. It starts from the same buffers and plain attributes, so it does the same as the first run; its
   changes to them are undone (state.py). A run must not write parameters. After the forward pass, parameters and the
   buffers that it did not change must not be modified or replaced. The repetition must save tensors of the same number,
   shapes, dtypes and devices. Otherwise an error is raised.
8. Gradients are right or an error is raised. A function that writes over its input is refused. A kept tensor that was
   modified raises PyTorch's error about an in-place operation. Reading a slot after the graph was freed, or still
   inside the forward pass, raises an error that says so. Only one thing is not checked unless `checking_repetitions`
   is on (checks.py): that branches compute the same values when they run again.
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
from .couplings import Coupling, HalfStep, detached, versions, widened
from .environment import Environment
from .replay import Section
from .state import Values

Undo = Callable[[], Values]


class Boundary:
    """The values between two steps: kept, or restored by the step that follows.

    `taken`: a step follows. Another step that starts from the same tensors begins its own chain.
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
        """Drop the values: the step that follows restores them."""
        self.following, self.kept = step, None

    def take(self) -> Values:
        """The values, detached; restored ones are not cached. RuntimeError if the graph was freed."""
        steps = []
        boundary = self
        while boundary.kept is None and boundary.restored is None:
            if boundary.following is None:
                raise RuntimeError(
                    "a reversible module was differentiated a second time after its graph was freed: give "
                    "retain_graph=True to the first backward pass"
                )
            steps.append(boundary.following)
            boundary = boundary.following.after
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
        """Set restored values. Without retain_graph=True the following step is no longer needed."""
        self.restored = tuple(tensor.detach() for tensor in values)
        if not keeps_graph():
            self.following = None


class Inputs(NamedTuple):
    """The dtypes and strides of a step's inputs, and whether each required a gradient and was a leaf."""

    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...], ...]
    require_grad: tuple[bool, ...]
    are_leaves: tuple[bool, ...]

    def __call__(self, values: Values, any_layout: int | None = None) -> Values:
        """New tensors that require gradients as the inputs did, so that a repetition saves the same tensors.

        They also get the strides of the inputs, because some operators (`F.linear`) choose by strides which tensors
        they save. The tensor with number `any_layout` keeps its strides, because no branch reads it. Inputs that were
        not leaves become views: a prepared branch (`recompute_activations`) would keep a leaf instead of its results.
        """
        again = []
        inputs = zip(values, self.strides, self.require_grad, self.are_leaves, strict=True)
        for number, (tensor, strides, needed, is_leaf) in enumerate(inputs):
            if number != any_layout and tensor.stride() != strides:
                tensor = _laid_out(tensor, strides)
            leaf = tensor.detach().requires_grad_(needed)
            again.append(leaf if is_leaf else leaf.view_as(leaf))
        return tuple(again)


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides; values must be equal along dimensions of stride 0."""
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
    inverse: None = None  # the repetition runs the same branch as the forward pass

    def run(self, halves: Values, checksum: Checksum) -> Values:
        output = self.half.output(halves)
        checksum.see(output)
        return self.half.replaced(halves, self.half.combine(halves[self.half.target], output))

    def again(self, halves: Values, like: Inputs, checksum: Checksum) -> Undo:
        """Run the branch on the halves after the update."""
        half, target = self.half, self.half.target
        halves = like(halves, any_layout=target)
        output = half.output(halves)
        checksum.see(output)

        def undone() -> Values:
            with torch.no_grad():
                values = half.undo(halves[target].detach(), detached(output))
            return half.replaced(halves, _as(values, like.dtypes[target]))

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
        """Run the function again. `values`: its kept inputs, or outputs to invert."""
        if self.inverse is not None:
            with torch.no_grad():
                values = _unchanged(self.inverse, values)
                values = tuple(_as(tensor, dtype) for tensor, dtype in zip(values, like.dtypes, strict=True))
        checksum.see(self.function(*like(values)))
        return lambda: values


class Step:
    """One executed step. It repeats from the boundary after it, or from its kept input if it has no inverse."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        move: Update | Apply,
        before: Boundary,
        inputs: Values,
        hooks: Hooks | None,
        preserve_rng_state: bool,
    ):
        self.move = move
        self.inputs = Inputs(*zip(*((x.dtype, x.stride(), x.requires_grad, x.is_leaf) for x in inputs), strict=True))
        self.environment = Environment(modules, inputs, preserve_rng_state)
        self.section = Section()
        self.checksum = Checksum(modules)
        self.before = weakref.ref(before)
        self.after = Boundary()
        if not move.invertible:
            before.keep(inputs, hooks)
        self.source = self.after if move.invertible else before

    def run(self, values: Values) -> Values:
        """The forward pass."""
        with self.section.dropping(self.repeat):
            outputs = self.move.run(values, self.checksum)
        self.environment.forward_pass_ended(inverts=self.move.inverse is not None)
        return outputs

    def repeat(self) -> None:
        """Fill the section, and restore the boundary before."""
        self._again(self.section.filling())

    def restore(self) -> None:
        """Restore the boundary before."""
        self._again(self.section.filling() if self.section.is_needed() else torch.no_grad())

    def _again(self, context: AbstractContextManager) -> None:
        values = self.source.take()
        with self.environment.restored(), context:
            undo = self.move.again(values, self.inputs, self.checksum)
        before = self.before()
        if before is not None and self.move.invertible:
            before.give(undo())


class Regrouping:
    """A tensor split into halves, or halves joined to a tensor. `back` is the inverse."""

    def __init__(self, back: Callable[[Values], Values], before: Boundary):
        self.back = back
        self.before = weakref.ref(before)
        self.after = Boundary()

    def restore(self) -> None:
        """Restore the boundary before."""
        before, values = self.before(), self.after.take()
        if before is not None:
            before.give(self.back(values))


def as_tuple(outputs: Tensor | Values) -> Values:
    """The outputs of a module, as a tuple. ValueError if they are not tensors."""
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
            f"module still needs: begin it with an operation that is not inplace"
        )
    return outputs


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Restored values in the original dtype; integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.round().to(dtype)


_MARK = "reversible boundary"  # in the metadata of an output's node


class Pass:
    """One forward pass through reversible modules, and the chain that its backward pass walks."""

    def __init__(
        self, inputs: Values, *, preserve_rng_state: bool = True, reversible: bool = True, widens: bool = False
    ):
        self.reversible = reversible  # False: an ordinary forward pass
        self.widens = widens  # under autocast couplings get float32, see `widened`
        self.values = inputs
        self.boundary = (_boundary_of(inputs) if reversible else None) or Boundary()
        # If this pass continues an earlier one: its last boundary, and the first step of this pass.
        self.start: tuple[Boundary, Step | Regrouping] | None = None
        self.restores = False  # whether the last step has an inverse, and so needs the values after it
        self.halves_of: Coupling | None = None  # the coupling whose halves the values are; None: they are whole
        self.hooks = current_hooks() if reversible else None
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
        """Run an invertible function of a module."""
        self._join()
        self._run([module], Apply(function, inverse))

    def keep_input(self, modules: Sequence[nn.Module], function: Callable) -> None:
        """Run a function of some modules; keep its input instead of their activations."""
        self._join()
        self._run(modules, Apply(function))

    def finish(self) -> Values:
        """The outputs. They are kept if the last step has an inverse."""
        self._join()
        if self.start is not None:
            boundary, first = self.start
            boundary.leave_to(first)
        if self.restores:
            self.boundary.keep(self.values, self.hooks)
            self.boundary.outputs = [(weakref.ref(tensor), tensor._version) for tensor in self.values]
            for tensor in self.values:
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_MARK] = weakref.ref(self.boundary)
        return self.values

    def _run(self, modules: Sequence[nn.Module], move: Update | Apply) -> None:
        if not self.reversible:
            self.values = move.run(self.values, Checksum([]))
            return
        step = Step(modules, move, self.boundary, self.values, self.hooks, self.preserve_rng_state)
        before, self.boundary.taken = self.boundary, True
        try:
            self.values = step.run(self.values)
        except BaseException:  # Ctrl-C as well
            before.taken = False  # a second try may follow
            raise
        if move.invertible:
            self._follow(step)
        self.boundary, self.restores = step.after, move.invertible

    def _follow(self, step: Step | Regrouping) -> None:
        """Let a step restore the boundary before it; outputs of an earlier pass only once this pass has succeeded."""
        if self.boundary.kept is None:
            self.boundary.leave_to(step)
        elif self.start is None:
            self.start = (self.boundary, step)

    def _split(self, coupling: Coupling) -> None:
        if self.halves_of is not None and self.halves_of.split_dim == coupling.split_dim:
            return
        self._join()
        dtype = self.values[0].dtype

        def split(whole: Values) -> Values:
            return coupling.split(*(map(widened, whole) if self.widens else whole))

        self._regroup(split, lambda halves: (coupling.join(halves).to(dtype),))
        self.halves_of = coupling

    def _join(self) -> None:
        if self.halves_of is not None:
            coupling, self.halves_of = self.halves_of, None
            self._regroup(lambda halves: (coupling.join(halves),), lambda whole: coupling.split(*whole))

    def _regroup(self, function: Callable[[Values], Values], back: Callable[[Values], Values]) -> None:
        self.values = function(self.values)
        if self.reversible:
            step = Regrouping(back, self.boundary)
            self._follow(step)
            self.boundary = step.after


def _boundary_of(values: Values) -> Boundary | None:
    """The last boundary of an earlier pass, if these are its unmodified outputs."""
    marks = [_metadata(tensor.grad_fn).get(_MARK) for tensor in values if tensor.grad_fn is not None]
    boundary = marks[0]() if marks and marks[0] is not None else None
    if boundary is None or boundary.taken or len(boundary.outputs) != len(values):
        return None
    pairs = zip(boundary.outputs, values, strict=True)
    return boundary if all(ref() is tensor and version == tensor._version for (ref, version), tensor in pairs) else None


def _metadata(node: Node) -> dict:
    """A node's own dictionary, which lives as long as the node. PyTorch's anomaly mode uses other keys in it."""
    return node.metadata  # type: ignore[return-value]  # torch's hints declare the property as a method
