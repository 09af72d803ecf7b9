"""Resize an example, and find the largest that fits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import shown, tensors_in
from ..torch_internals import tree_map

_SIDE = 32  # images and texts grow in steps of this size, because most networks halve images five times


class Growth(NamedTuple):
    """How an example grows."""

    value: int  # batch size, first side of images, or length of texts
    step: int  # step by which the value grows
    power: int  # the bytes of a step grow about linearly with value ** power
    resized: Callable[[int], Any]  # value -> an example of that size, filled with zeros
    most: float = math.inf


def growth(example: Any, along: str | None) -> Growth:
    """How an example (arguments and keyword arguments) can grow.

    `along`: None: not at all. "batch": dimension 0 of every tensor that has the first tensor's batch size. "size": the
    sides of images, in proportion, in every tensor whose last dimensions are those of the first tensor; for integers or
    two-dimensional tensors only the last dimension, the length of a text.

    ValueError: `along` is something else, the first tensor is empty or has no such dimension, or tensors are in a list.
    """
    if along is None:
        return Growth(1, 1, 1, lambda value: example, most=1)
    args, kwargs = example
    if any(isinstance(one, list) and tensors_in(one) for one in (*args, *kwargs.values())):
        raise ValueError(f"grow={shown(along)} with a list of tensors: expected a batch in one tensor; leave grow out")
    first = next(iter(tensors_in(example)), None)
    shape = () if first is None else tuple(first.shape)
    is_known = isinstance(along, str) and along in ("batch", "size")
    if first is None or not is_known or 0 in shape or len(shape) < (1 if along == "batch" else 2):
        expected = "expected 'batch', or 'size' of images or texts, and no empty tensor"
        raise ValueError(f"grow={shown(along)} with an example of shape {shape}: {expected}")
    if along == "batch":
        return Growth(shape[0], 1, 1, lambda value: _with_shapes(example, shape[:1], (value,), slice(1)))
    dims = len(shape[2:]) if len(shape) > 2 and first.is_floating_point() else len(shape[1:])
    sides = shape[-dims:]
    step = min(_SIDE, math.gcd(*sides) & -math.gcd(*sides))  # a power of two

    def resized(value: int) -> Any:
        grown = tuple(max(step, one * value // sides[0] // step * step) for one in sides)
        return _with_shapes(example, sides, grown, slice(-dims, None), 1)

    return Growth(sides[0], step, dims, resized)


def shape_of(example: Any) -> tuple[int, ...]:
    """The shape of the first tensor."""
    return next((tuple(tensor.shape) for tensor in tensors_in(example)), ())


def _with_shapes(example: Any, old: tuple[int, ...], new: tuple[int, ...], where: slice, before: int = 0) -> Any:
    """The example with zeros, with dimensions `old` replaced by `new` at `where`, after the first `before` ones."""

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        if len(shape) > before and tuple(shape[before:][where]) == old:
            shape[where] = new
        return leaf.new_zeros(shape).requires_grad_(leaf.requires_grad)

    return tree_map(like, example)


def largest(
    peak: Callable[[int], int], limit: int, smallest: int, step: int, power: int, most: float = math.inf
) -> int | None:
    """The largest value, from `smallest` up in steps to `most`, whose training step fits; None if `smallest` does not.

    `peak`: value -> bytes of a training step, which grow about linearly with value ** power: power is 1 for the number
    of crops, 2 for the side of square crops.
    """
    fits, used = smallest, peak(smallest)
    if used > limit:
        return None
    beyond = 2.0 * smallest
    while True:
        too_large = int(min(max(fits + step, math.ceil(beyond / step) * step), most))
        if too_large <= fits:
            return fits
        exceeding = peak(too_large)
        if exceeding > limit:
            break
        slope = max(1.0, (exceeding - used) / (too_large**power - fits**power))  # of the line through the last two
        fits, used = too_large, exceeding
        beyond = (fits**power + 1.02 * (limit - used) / slope) ** (1 / power)
        beyond = min(beyond, fits * 16 ** (1 / power))  # for small values, the weights may hide the slope
    while too_large - fits > step:
        share = (limit - used) / (exceeding - used)
        between = (fits**power + share * (too_large**power - fits**power)) ** (1 / power)
        value = min(max(int(between) // step * step, fits + step), too_large - step)
        if (found := peak(value)) <= limit:
            fits, used = value, found
            if too_large - fits > step and (found := peak(fits + step)) > limit:  # almost always
                return fits
        else:
            too_large, exceeding = value, found
    return fits
