"""What the steps of a chain compute: half a coupling or a whole function, forward, and again in the backward pass."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..saved import laid_out
from .checks import Checksum
from .couplings import HalfStep, call_without_writes, detached
from .state import Values

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

        if half.combine_saves:  # a product saves its factors
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
                values = as_tuple(call_without_writes(self.inverse, values))
                values = tuple(
                    _with_dtype(tensor, dtype) for tensor, dtype in zip(values, properties.dtypes, strict=True)
                )
        checksum.compare(self.function(*properties.recreate(values)))
        return lambda: values


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
