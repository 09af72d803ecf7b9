"""What the steps of a chain compute: half a coupling or a whole function, forward, and again in the backward pass."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..saved import laid_out
from .checks import Checksum
from .couplings import HalfStep, detached, unchanged
from .state import Values

Undo = Callable[[], Values]


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
                tensor = laid_out(tensor, strides).as_strided(tensor.shape, strides)
            leaf = tensor.detach().requires_grad_(needed)
            again.append(leaf if is_leaf else leaf.view_as(leaf))
        return tuple(again)


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
        outputs = as_tuple(unchanged(self.function, values))
        checksum.see(outputs)
        return outputs

    def again(self, values: Values, like: Inputs, checksum: Checksum) -> Undo:
        """Run the function again. `values`: its kept inputs, or outputs to invert."""
        if self.inverse is not None:
            with torch.no_grad():
                values = as_tuple(unchanged(self.inverse, values))
                values = tuple(_as(tensor, dtype) for tensor, dtype in zip(values, like.dtypes, strict=True))
        checksum.see(self.function(*like(values)))
        return lambda: values


def as_tuple(outputs: Tensor | Values) -> Values:
    """The outputs of a module, as a tuple. ValueError if they are not tensors."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if not found:
        raise ValueError("a reversible module got or returned nothing: expected tensors")
    for output in found:
        if not isinstance(output, Tensor):
            raise ValueError(f"a reversible module got or returned a {type(output).__name__}: expected tensors")
    return found


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Restored values in the original dtype; integers are rounded."""
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.round().to(dtype)
