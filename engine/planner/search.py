"""Find the largest minibatch or crop that fits into a device's memory, with few traces."""

import math
from collections.abc import Callable


def most_crops(peak: Callable[[int], int], budget: int, fewest: int, most: float = math.inf) -> int | None:
    """The largest number of crops, from `fewest` to `most`, whose step fits; None if not even `fewest` crops do.

    `peak`: crops -> bytes of a step, which grow about linearly.
    """
    return _largest(peak, budget, fewest, most, step=1, power=1)


def largest_crop(peak: Callable[[int], int], budget: int, smallest: int, multiple: int = 8) -> int | None:
    """The largest side of square crops, a multiple of `multiple` pixels, whose step fits; None if `smallest` does not.

    `peak`: side -> bytes of a step, which grow about linearly with the area.
    """
    return _largest(peak, budget, smallest, math.inf, step=multiple, power=2)


def _largest(
    peak: Callable[[int], int], budget: int, smallest: int, largest: float, step: int, power: int
) -> int | None:
    """The largest value that fits, from `smallest` up in steps. Bytes grow about linearly with value ** power."""
    fits, fitting = smallest, peak(smallest)
    if fitting > budget:
        return None
    beyond = 2.0 * smallest
    while True:
        too_large = int(min(max(fits + step, math.ceil(beyond / step) * step), largest))
        if too_large <= fits:
            return fits
        exceeding = peak(too_large)
        if exceeding > budget:
            break
        slope = max(1.0, (exceeding - fitting) / (too_large**power - fits**power))  # of the line through the last two
        fits, fitting = too_large, exceeding
        beyond = (fits**power + 1.02 * (budget - fitting) / slope) ** (1 / power)
    while too_large - fits > step:
        share = (budget - fitting) / (exceeding - fitting)
        between = (fits**power + share * (too_large**power - fits**power)) ** (1 / power)
        value = min(max(int(between) // step * step, fits + step), too_large - step)
        if (found := peak(value)) <= budget:
            fits, fitting = value, found
            if too_large - fits > step and (found := peak(fits + step)) > budget:  # almost always
                return fits
        else:
            too_large, exceeding = value, found
    return fits
