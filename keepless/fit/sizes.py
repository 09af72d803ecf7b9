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
    """Raise ValueError if an example cannot grow as `growth` describes.

    It cannot if `along` is another word, if the first tensor is empty or has no such dimension, or if tensors are in a
    list.
    """
    if along is None:
        return
    args, kwargs = example
    if any(isinstance(argument, list) and tensors_in(argument) for argument in (*args, *kwargs.values())):
        raise ValueError(f"grow={shown(along)} with a list of tensors: expected a batch in one tensor; leave grow out")
    shape = shape_of(example)
    is_known = isinstance(along, str) and along in ("batch", "size")
    least_dimensions = 1 if along == "batch" else 2
    if not is_known or 0 in shape or len(shape) < least_dimensions:
        expected = "expected 'batch', or 'size' of images or texts, and no empty tensor"
        raise ValueError(f"grow={shown(along)} with an example of shape {shape}: {expected}")


def growth(example: Any, along: str | None) -> Growth:
    """How an example (arguments and keyword arguments) can grow, which `check_growth` has checked.

    `along`: "batch", "size", or None for an example that does not grow.
    """
    if along is None:
        return Growth(value=1, step=1, power=1, resized=lambda value: example, most=1)
    return _growth_of_batch(example) if along == "batch" else _growth_of_sides(example)


def _growth_of_batch(example: Any) -> Growth:
    """Let dimension 0 grow in every tensor that has the first tensor's batch size."""
    batch = shape_of(example)[0]

    def with_batch(value: int) -> Any:
        return _with_shapes(example, lambda shape: (value, *shape[1:]) if shape[:1] == (batch,) else shape)

    return Growth(value=batch, step=1, power=1, resized=with_batch)


def _growth_of_sides(example: Any) -> Growth:
    """Let the sides of images grow, in proportion, in every tensor that has the first tensor's sides.

    The sides are all dimensions after the channels. Integers and two-dimensional tensors have no channels: their sides
    follow the batch, as the length of a text does.
    """
    first, *_ = tensors_in(example)
    is_image = first.dim() > 2 and first.is_floating_point()
    sides = shape_of(example)[2 if is_image else 1 :]
    divisor = math.gcd(*sides)
    step = min(_SIDE, divisor & -divisor)  # the largest power of two that divides all sides, at most `_SIDE`

    def with_side(value: int) -> Any:
        scaled = [side * value // sides[0] for side in sides]
        rounded_down = [side // step * step for side in scaled]
        new_sides = tuple(max(step, side) for side in rounded_down)

        def new_shape(shape: Shape) -> Shape:
            has_sides = shape[1:][-len(sides) :] == sides  # dimension 0, the batch, is no side
            return shape[: -len(sides)] + new_sides if has_sides else shape

        return _with_shapes(example, new_shape)

    return Growth(value=sides[0], step=step, power=len(sides), resized=with_side)


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
    fitting = _Measured(smallest, peak(smallest))
    if fitting.peak > limit:
        return None
    too_large: _Measured | None = None
    estimate = 2.0 * smallest
    while too_large is None or too_large.value - fitting.value > step:
        highest = most if too_large is None else too_large.value - step
        value = int(min(max(estimate // step * step, fitting.value + step), highest))
        if value <= fitting.value:
            break
        measured = _Measured(value, peak(value))
        previous = fitting
        if measured.peak > limit:
            too_large = measured
        else:
            fitting = measured
        second = too_large or previous
        # of the line through both
        slope = max(1.0, (fitting.peak - second.peak) / (fitting.value**power - second.value**power))
        estimate = (fitting.value**power + 1.02 * (limit - fitting.peak) / slope) ** (1 / power)
        estimate = min(estimate, fitting.value * 16 ** (1 / power))  # for small values, the weights may hide the slope
    return fitting.value


class _Measured(NamedTuple):
    """A value, and the peak in bytes of its training step."""

    value: int
    peak: int
