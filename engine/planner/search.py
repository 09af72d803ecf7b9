"""Find the largest minibatch or crop that fits into a device's memory, with few traces."""

import math
from collections.abc import Callable


def largest(peak: Callable[[int], int], budget: int, smallest: int, step: int, power: int) -> int | None:
    """The largest value, from `smallest` up in steps, whose training step fits; None if `smallest` does not.

    `peak`: value -> bytes of a training step, which grow about linearly with value ** power: the power is 1 for a
    number of crops, 2 for the side of square crops.
    """
    fits, fitting = smallest, peak(smallest)
    if fitting > budget:
        return None
    too_large, exceeding = 2 * smallest, peak(2 * smallest)
    while exceeding <= budget:  # go on along the line through the last two
        slope = max(1.0, (exceeding - fitting) / (too_large**power - fits**power))
        fits, fitting = too_large, exceeding
        beyond = (fits**power + 1.02 * (budget - fitting) / slope) ** (1 / power)
        too_large = max(fits + step, math.ceil(beyond / step) * step)
        exceeding = peak(too_large)
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
