"""The largest example that fits."""

import math
from collections.abc import Callable


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
