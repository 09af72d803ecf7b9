"""Resize an example, and find the largest that fits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import shown, tensors_in
from ..torch_internals import tree_map

Shape = tuple[int, ...]

_SIDE = 32  # images and texts grow in steps of this size, because most networks halve images five times


class Growth(NamedTuple):
    """How an example grows."""

    value: int  # batch size, first side of images, or length of texts
    step: int  # step by which the value grows
    power: int  # the bytes of a step grow about linearly with value ** power
    resized: Callable[[int], Any]  # value -> an example of that size, filled with zeros
    most: float = math.inf


def check_growth(example: Any, along: str | None) -> None:
    """Raise ValueError if an example cannot grow along this: see `growth`.

    `along` is something else, the first tensor is empty or has no such dimension, or tensors are in a list.
    """
    if along is None:
        return
    args, kwargs = example
    if any(isinstance(argument, list) and tensors_in(argument) for argument in (*args, *kwargs.values())):
        raise ValueError(f"grow={shown(along)} with a list of tensors: expected a batch in one tensor; leave grow out")
    shape = shape_of(example)
    is_known = isinstance(along, str) and along in ("batch", "size")
    if not is_known or 0 in shape or len(shape) < (1 if along == "batch" else 2):
        expected = "expected 'batch', or 'size' of images or texts, and no empty tensor"
        raise ValueError(f"grow={shown(along)} with an example of shape {shape}: {expected}")


def growth(example: Any, along: str | None) -> Growth:
    """How an example (arguments and keyword arguments) can grow, which `check_growth` has checked.

    `along`: None: not at all. "batch": dimension 0 of every tensor that has the first tensor's batch size. "size": the
    sides of images, in proportion, in every tensor whose last dimensions are those of the first tensor; for integers or
    two-dimensional tensors only the last dimension, the length of a text.
    """
    if along is None:
        return Growth(value=1, step=1, power=1, resized=lambda value: example, most=1)
    first, *_ = tensors_in(example)
    batch, *_ = shape = tuple(first.shape)
    if along == "batch":

        def with_batch(value: int) -> Any:
            return _with_shapes(example, lambda sizes: (value, *sizes[1:]) if sizes[:1] == (batch,) else sizes)

        return Growth(value=batch, step=1, power=1, resized=with_batch)
    side_count = len(shape[2:]) if len(shape) > 2 and first.is_floating_point() else len(shape[1:])
    sides = shape[-side_count:]
    step = min(_SIDE, math.gcd(*sides) & -math.gcd(*sides))  # a power of two

    def with_side(value: int) -> Any:
        scaled = [side * value // sides[0] for side in sides]
        rounded_down = [side // step * step for side in scaled]
        new_sides = tuple(max(step, side) for side in rounded_down)

        def new_shape(shape: Shape) -> Shape:
            has_sides = shape[1:][-side_count:] == sides  # dimension 0, the batch, is no side
            return shape[:-side_count] + new_sides if has_sides else shape

        return _with_shapes(example, new_shape)

    return Growth(value=sides[0], step=step, power=side_count, resized=with_side)


def shape_of(example: Any) -> Shape:
    """The shape of the first tensor; () if there is none."""
    return next((tuple(tensor.shape) for tensor in tensors_in(example)), ())


def _with_shapes(example: Any, new_shape: Callable[[Shape], Shape]) -> Any:
    """The example with zeros. `new_shape`: the shape of a tensor -> its shape in the new example."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.new_zeros(new_shape(tuple(leaf.shape))).requires_grad_(leaf.requires_grad)

    return tree_map(zeros, example)


def largest(
    peak: Callable[[int], int], limit: int, smallest: int, step: int, power: int, most: float = math.inf
) -> int | None:
    """The largest value, from `smallest` up in steps to `most`, whose training step fits; None if `smallest` does not.

    `peak`: value -> bytes of a training step, which grow about linearly with value ** power: power is 1 for the number
    of crops, 2 for the side of square crops.
    """
    fitting = smallest
    fitting_peak = peak(fitting)
    if fitting_peak > limit:
        return None
    estimate = 2.0 * smallest
    while True:
        too_large = int(min(max(fitting + step, math.ceil(estimate / step) * step), most))
        if too_large <= fitting:
            return fitting
        exceeding_peak = peak(too_large)
        if exceeding_peak > limit:
            break
        # of the line through the last two peaks
        slope = max(1.0, (exceeding_peak - fitting_peak) / (too_large**power - fitting**power))
        fitting, fitting_peak = too_large, exceeding_peak
        estimate = (fitting**power + 1.02 * (limit - fitting_peak) / slope) ** (1 / power)
        estimate = min(estimate, fitting * 16 ** (1 / power))  # for small values, the weights may hide the slope
    while too_large - fitting > step:
        share = (limit - fitting_peak) / (exceeding_peak - fitting_peak)
        estimate = (fitting**power + share * (too_large**power - fitting**power)) ** (1 / power)
        middle = min(max(int(estimate) // step * step, fitting + step), too_large - step)
        middle_peak = peak(middle)
        if middle_peak > limit:
            too_large, exceeding_peak = middle, middle_peak
            continue
        fitting, fitting_peak = middle, middle_peak
        if too_large - fitting > step and peak(fitting + step) > limit:  # as is almost always so
            return fitting
    return fitting
