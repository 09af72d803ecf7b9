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
    if any(isinstance(argument, list) and tensors_in(argument) for argument in (*args, *kwargs.values())):
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
        new_sides = tuple(max(step, side * value // sides[0] // step * step) for side in sides)
        return _with_shapes(example, sides, new_sides, slice(-dims, None), 1)

    return Growth(sides[0], step, dims, resized)


def shape_of(example: Any) -> tuple[int, ...]:
    """The shape of the first tensor."""
    return next((tuple(tensor.shape) for tensor in tensors_in(example)), ())


def _with_shapes(
    example: Any, old_sizes: tuple[int, ...], new_sizes: tuple[int, ...], dimensions: slice, skipped: int = 0
) -> Any:
    """The example with zeros. Tensors with `old_sizes` in these dimensions get `new_sizes` there.

    Tensors that have no more dimensions than the `skipped` first ones keep their sizes.
    """

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        if len(shape) > skipped and tuple(shape[skipped:][dimensions]) == old_sizes:
            shape[dimensions] = new_sizes
        return leaf.new_zeros(shape).requires_grad_(leaf.requires_grad)

    return tree_map(like, example)


def largest(
    peak: Callable[[int], int], limit: int, smallest: int, step: int, power: int, most: float = math.inf
) -> int | None:
    """The largest value, from `smallest` up in steps to `most`, whose training step fits; None if `smallest` does not.

    `peak`: value -> bytes of a training step, which grow about linearly with value ** power: power is 1 for the number
    of crops, 2 for the side of square crops.
    """
    fits = smallest
    fitting_peak = peak(fits)
    if fitting_peak > limit:
        return None
    estimate = 2.0 * smallest
    while True:
        too_large = int(min(max(fits + step, math.ceil(estimate / step) * step), most))
        if too_large <= fits:
            return fits
        exceeding_peak = peak(too_large)
        if exceeding_peak > limit:
            break
        # of the line through the last two
        slope = max(1.0, (exceeding_peak - fitting_peak) / (too_large**power - fits**power))
        fits, fitting_peak = too_large, exceeding_peak
        estimate = (fits**power + 1.02 * (limit - fitting_peak) / slope) ** (1 / power)
        estimate = min(estimate, fits * 16 ** (1 / power))  # for small values, the weights may hide the slope
    while too_large - fits > step:
        share = (limit - fitting_peak) / (exceeding_peak - fitting_peak)
        estimate = (fits**power + share * (too_large**power - fits**power)) ** (1 / power)
        middle = min(max(int(estimate) // step * step, fits + step), too_large - step)
        middle_peak = peak(middle)
        if middle_peak > limit:
            too_large, exceeding_peak = middle, middle_peak
            continue
        fits, fitting_peak = middle, middle_peak
        if too_large - fits > step and peak(fits + step) > limit:  # almost always
            return fits
    return fits
