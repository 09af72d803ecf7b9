"""The chain of steps by which reversible modules do without stored inputs: backward walks it from the last output.

The rules, which this file implements together with replay.py:

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
   passes with couplings, three with saved activations.
5. Restored values are handed over by the first `take` and not cached. Autograd frees each slot with its node. With
   retain_graph=True a slot is only emptied, and the next backward pass computes everything again.
6. Lifetimes. References point one way: from slots to their step, from a step to the boundary after it, and from a
   boundary to the step that follows. A step without an inverse also refers to the boundary before it; other steps only
   weakly. So the chain is freed with the graph, and values that no earlier step needs are not restored.
7. Environment. A repetition runs with the autocast settings, modes, and (with `preserve_rng_state`) random numbers of
   the first run. It starts from the same buffers and plain attributes, so it does the same as the first run; its
   changes to them are undone. A run must not write parameters. After the forward pass, parameters and the
   buffers that it did not change must not be modified or replaced. The repetition must save tensors of the same number,
   shapes, dtypes and devices. Otherwise an error is raised.
8. Gradients are right or an error is raised. A function that writes over its input is refused. A kept tensor that was
   modified raises PyTorch's error about an in-place operation. Reading a slot after the graph was freed, or still
   inside the forward pass, raises an error that says so. Only one thing is not checked unless `checking_repetitions`
   is on (checks.py): that branches compute the same values when they run again.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..saved import Kept, laid_out
from ..torch_internals import Hooks, current_hooks, keeps_graph
from .checks import Checksum
from .couplings import Coupling, HalfStep, call_without_writes, detached, widened
from .replay import Section, Values

Undo = Callable[[], Values]


class InputProperties(NamedTuple):
    """The dtypes and strides of a step's inputs, and whether each required a gradient and was a leaf."""

    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...], ...]
    require_grad: tuple[bool, ...]
    are_leaves: tuple[bool, ...]

    @classmethod
    def from_inputs(cls, inputs: Values) -> "InputProperties":
        properties = [(tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.is_leaf) for tensor in inputs]
        return cls(*zip(*properties, strict=True))

    def recreate(self, values: Values, any_layout: int | None = None) -> Values:
        """New tensors that require gradients as the inputs did, so that a repetition saves the same tensors.

        They also get the strides of the inputs, because some operators (`F.linear`) choose by strides which tensors
        they save. The tensor with number `any_layout` keeps its strides, because no branch reads it. Inputs that were
        not leaves become views: a prepared branch (`recompute_activations`) would keep a leaf instead of its results.
        """
        inputs = []
        rows = zip(values, self.strides, self.require_grad, self.are_leaves, strict=True)
        for number, (tensor, strides, requires_grad, is_leaf) in enumerate(rows):
            if number != any_layout and tensor.stride() != strides:
                tensor = laid_out(tensor, strides).as_strided(tensor.shape, strides)
            leaf = tensor.detach().requires_grad_(requires_grad)
            inputs.append(leaf if is_leaf else leaf.view_as(leaf))
        return tuple(inputs)


class Update(NamedTuple):
    """One half of a coupling. Its branch runs once in the backward pass, to fill the section and to undo the update."""

    half: HalfStep
    invertible: bool = True
    inverse: None = None  # the repetition runs the same branch as the forward pass

    def run(self, halves: Values, checksum: Checksum) -> Values:
        output = self.half.branch_output(halves)
        checksum.remember(output)
        return self.half.with_target(halves, self.half.combine(halves[self.half.target], output))

    def repeat(self, halves: Values, properties: InputProperties, checksum: Checksum) -> Undo:
        """Run the branch on the halves after the update."""
        half = self.half
        target = half.target
        halves = properties.recreate(halves, any_layout=target)
        output = half.branch_output(halves)
        checksum.compare(output)

        def undone() -> Values:
            with torch.no_grad():
                values = half.undo(halves[target].detach(), detached(output))
            return half.with_target(halves, _with_dtype(values, properties.dtypes[target]))

        if half.combine_saves:  # a product saves its factors, for which the slots wait
            half.combine(properties.recreate(undone(), any_layout=target)[target], output)
        return undone


class Apply(NamedTuple):
    """A function of some tensors. The backward pass applies its inverse, if it has one, and runs the function again."""

    function: Callable
    inverse: Callable | None = None

    @property
    def invertible(self) -> bool:
        return self.inverse is not None

    def run(self, values: Values, checksum: Checksum) -> Values:
        outputs = as_tuple(call_without_writes(self.function, values))
        checksum.remember(outputs)
        return outputs

    def repeat(self, values: Values, properties: InputProperties, checksum: Checksum) -> Undo:
        """Run the function again. `values`: its kept inputs, or outputs to invert."""
        if self.inverse is not None:
            with torch.no_grad():
                restored = as_tuple(call_without_writes(self.inverse, values))
                values = tuple(map(_with_dtype, restored, properties.dtypes))
        checksum.compare(self.function(*properties.recreate(values)))
        return lambda: values


class _KeptValue(Kept):
    __slots__ = ()

    name = "an input or output of a reversible module"


class Boundary:
    """The values between two steps: kept, or restored by the step that follows.

    `is_followed`: a step follows. Another step that starts from the same tensors begins its own chain.
    """

    def __init__(self) -> None:
        self.kept: tuple[Kept, ...] | None = None
        self.restored: Values | None = None
        self.following: Step | Regrouping | None = None
        self.is_followed = False
        self.outputs: list[tuple[weakref.ref[Tensor], int]] = []  # of the pass that ends here, with their versions

    def keep(self, values: Values, hooks: Hooks | None) -> None:
        if self.kept is None:
            self.kept = tuple(_KeptValue(tensor, hooks) for tensor in values)

    def leave_to(self, step: "Step | Regrouping") -> None:
        """Drop the values: the step that follows restores them."""
        self.following = step
        self.is_followed = True
        self.kept = None

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
        if self.following is not None or not keeps_graph():  # they can be restored again, or nothing reads them again
            self.restored = None
        return values

    def give(self, values: Values) -> None:
        """Set restored values. Without retain_graph=True the following step is no longer needed."""
        self.restored = tuple(tensor.detach() for tensor in values)
        if not keeps_graph():
            self.following = None


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
        self.properties = InputProperties.from_inputs(inputs)
        self.section = Section(modules, inputs, preserve_rng_state)
        self.checksum = Checksum(modules)
        self.before = weakref.ref(before)
        self.after = Boundary()
        if not move.invertible:
            before.keep(inputs, hooks)
        self.source = self.after if move.invertible else before

    def run(self, values: Values) -> Values:
        """The forward pass."""
        with self.section.first_run(self.restore, inverts=self.move.inverse is not None):
            return self.move.run(values, self.checksum)

    def restore(self) -> None:
        """Fill the section, and restore the boundary before."""
        values = self.source.take()
        with self.section.repetition():
            undo = self.move.repeat(values, self.properties, self.checksum)
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
        values = self.after.take()
        before = self.before()
        if before is not None:
            before.give(self.back(values))


_MARK = "reversible boundary"  # in the metadata of an output's node


class Pass:
    """One forward pass through reversible modules, and the chain that its backward pass walks."""

    def __init__(
        self, inputs: Values, *, preserve_rng_state: bool = True, reversible: bool = True, widens: bool = False
    ):
        self.reversible = reversible  # False: an ordinary forward pass, which saves its activations
        self.widens = widens  # under autocast couplings get float32, see `widened`
        self.values = inputs
        self.boundary = (_boundary_of(inputs) if reversible else None) or Boundary()
        # If this pass continues an earlier one: its last boundary, and the step that restores it once this pass ends.
        self.deferred: tuple[Boundary, Step | Regrouping] | None = None
        self.restores = False  # whether the last step has an inverse, and so needs the values after it
        self.halves_of: Coupling | None = None  # the coupling whose halves the values are; None: they are whole
        self.hooks = current_hooks() if reversible else None
        self.preserve_rng_state = preserve_rng_state

    def couple(self, coupling: Coupling, inverse: bool = False) -> None:
        """Run a coupling, or its inverse."""
        self._split(coupling)
        if not (coupling.invertible or inverse):
            self._run([coupling], Apply(coupling.couple))
            return
        half_steps = coupling.half_steps()
        if inverse:
            first, second = half_steps
            half_steps = (second.inverted(), first.inverted())
        for half_step in half_steps:
            self._run([half_step.branch], Update(half_step))

    def apply(self, modules: Sequence[nn.Module], function: Callable, inverse: Callable | None = None) -> None:
        """Run a function of some modules, and keep its input instead of their activations if it has no inverse."""
        self._join()
        self._run(modules, Apply(function, inverse))

    def finish(self) -> Values:
        """The outputs. They are kept if the last step has an inverse."""
        self._join()
        if self.deferred is not None:
            last_boundary, first_step = self.deferred
            last_boundary.leave_to(first_step)
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
        before = self.boundary
        before.is_followed = True
        try:
            self.values = step.run(self.values)
        except BaseException:  # Ctrl-C as well
            before.is_followed = False  # a second try may follow
            raise
        if move.invertible:
            self._restore_boundary_by(step)
        self.boundary = step.after
        self.restores = move.invertible

    def _restore_boundary_by(self, step: Step | Regrouping) -> None:
        """Let a step restore the boundary before it; outputs of an earlier pass only once this pass has succeeded."""
        if self.boundary.kept is None:
            self.boundary.leave_to(step)
        else:
            assert self.deferred is None  # inside a pass, only a step without an inverse keeps the values before it
            self.deferred = (self.boundary, step)

    def _split(self, coupling: Coupling) -> None:
        """Split the values into halves of a coupling, if they are not yet."""
        if self.halves_of is not None and self.halves_of.split_dim == coupling.split_dim:
            return
        self._join()
        dtype = self.values[0].dtype

        def split(whole: Values) -> Values:
            return coupling.split(*(map(widened, whole) if self.widens else whole))

        self._regroup(split, lambda halves: (coupling.join(halves).to(dtype),))
        self.halves_of = coupling

    def _join(self) -> None:
        """Join the values, if they are halves."""
        if self.halves_of is not None:
            coupling = self.halves_of
            self.halves_of = None
            self._regroup(lambda halves: (coupling.join(halves),), lambda whole: coupling.split(*whole))

    def _regroup(self, function: Callable[[Values], Values], back: Callable[[Values], Values]) -> None:
        self.values = function(self.values)
        if self.reversible:
            step = Regrouping(back, self.boundary)
            self._restore_boundary_by(step)
            self.boundary = step.after


def _boundary_of(values: Values) -> Boundary | None:
    """The last boundary of an earlier pass, if these are its unmodified outputs."""
    marks = [_metadata(tensor.grad_fn).get(_MARK) for tensor in values if tensor.grad_fn is not None]
    boundary = marks[0]() if marks and marks[0] is not None else None
    if boundary is None or boundary.is_followed or len(boundary.outputs) != len(values):
        return None
    pairs = zip(boundary.outputs, values, strict=True)
    is_unmodified = all(ref() is tensor and version == tensor._version for (ref, version), tensor in pairs)
    return boundary if is_unmodified else None


def _metadata(node: Node) -> dict:
    """A node's own dictionary, which lives as long as the node. PyTorch's anomaly mode uses other keys in it."""
    return node.metadata  # type: ignore[return-value]  # torch's hints declare the property as a method


def as_tuple(outputs: Tensor | Values) -> Values:
    """The outputs of a module, as a tuple. ValueError if they are not tensors."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    if not tensors:
        raise ValueError("a reversible module got or returned nothing: expected tensors")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a reversible module got or returned a {type(tensor).__name__}: expected tensors")
    return tensors


def _with_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Restored values in the original dtype; integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.round().to(dtype)
