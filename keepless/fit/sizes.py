"""Examples of other sizes, and the largest that fits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import tensors_in
from ..torch_internals import tree_map

_SIDE = 32  # images and texts grow by so much: most networks halve images five times


class Growth(NamedTuple):
    """How an example grows."""

    value: int  # its batch, or its first side or length
    step: int  # by which it grows
    power: int  # the bytes of a step grow about linearly with value ** power
    resized: Callable[[int], Any]  # value -> an example of that size, of zeros
    most: float = math.inf


def growth(example: Any, along: str | None) -> Growth:
    """How an example, arguments and keyword arguments, can grow.

    `along`: None: not at all. "batch": dimension 0, of every tensor whose dimension 0 equals the first tensor's.
    "size": the sides of images, in proportion, of every tensor that ends with those of the first tensor; for integers
    or two-dimensional tensors the last dimension alone, the length of a text.

    A batch may be a list, as detectors take it: of images (C, H, W) of any sizes, of texts (T,), or of dictionaries
    that begin with one. "batch" then repeats the parts of every argument that is a list as long.
    ValueError: `along` is another word, or the first tensor has no such dimension.
    """
    if along is None:
        return Growth(1, 1, 1, lambda value: example, most=1)
    parts = listed(example)
    first = next(iter(tensors_in(example)), None)
    shape = () if first is None else tuple(first.shape)
    batch = 0 if parts else 1  # dimensions of it in a tensor
    if first is None or along not in ("batch", "size") or len(shape) < (1 if along == "batch" else batch + 1):
        raise ValueError(
            f"grow={along!r} with an example of shape {shape}: expected 'batch', or 'size' of images or texts"
        )
    if along == "batch" and parts:
        return Growth(len(parts), 1, 1, lambda value: _repeated(example, len(parts), value))
    if along == "batch":
        return Growth(shape[0], 1, 1, lambda value: _with_shapes(example, {shape[:1]: (value,)}, slice(1)))
    dims = len(shape[batch + 1 :]) if len(shape) > batch + 1 and first.is_floating_point() else len(shape[batch:])
    firsts = [tensors_in(part)[0] for part in parts] or [first]
    found = {tuple(one.shape[-dims:]) for one in firsts}
    side = shape[-dims]
    step = min(_SIDE, *(math.gcd(*sides) & -math.gcd(*sides) for sides in found))  # a power of two

    def resized(value: int) -> Any:
        grown = {sides: tuple(max(step, one * value // side // step * step) for one in sides) for sides in found}
        return _with_shapes(example, grown, slice(-dims, None), batch)

    return Growth(side, step, dims, resized)


def listed(example: Any) -> list[Any]:
    """The parts of a batch that is given as a list; nothing if it is one tensor."""
    args, kwargs = example
    given = next((one for one in (*args, *kwargs.values()) if tensors_in(one)), None)
    is_batch = isinstance(given, list) and all(
        tensors_in(part)[:1] and tensors_in(part)[0].dim() <= 3 for part in given
    )
    return given if isinstance(given, list) and is_batch else []


def shape_of(example: Any) -> tuple[int, ...]:
    """The shape of the first tensor, after the length of a list of such tensors."""
    first = next((tuple(tensor.shape) for tensor in tensors_in(example)), ())
    parts = listed(example)
    return (len(parts), *first) if parts else first


def _with_shapes(example: Any, shapes: dict[tuple, tuple[int, ...]], where: slice, before: int = 0) -> Any:
    """The example of zeros, with other dimensions `where` they are the given ones, behind `before` others."""

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        if len(shape) > before and (found := tuple(shape[before:][where])) in shapes:
            shape[where] = shapes[found]
        return leaf.new_zeros(shape).requires_grad_(leaf.requires_grad)

    return tree_map(like, example)


def _repeated(example: Any, number: int, value: int) -> Any:
    """The example with `value` parts in each argument that is a list of `number`."""

    def repeated(one: Any) -> Any:
        parts = [one[i % number] for i in range(value)] if isinstance(one, list) and len(one) == number else one
        return _with_shapes(parts, {}, slice(0))

    args, kwargs = example
    return tuple(map(repeated, args)), {name: repeated(one) for name, one in kwargs.items()}


def largest(
    peak: Callable[[int], int], limit: int, smallest: int, step: int, power: int, most: float = math.inf
) -> int | None:
    """The largest value, from `smallest` up in steps to `most`, whose training step fits; None if `smallest` does not.

    `peak`: value -> bytes of a training step, which grow about linearly with value ** power: the power is 1 for a
    number of crops, 2 for the side of square crops.
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
        beyond = min(beyond, fits * 16 ** (1 / power))  # the weights may hide the slope between small values
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
