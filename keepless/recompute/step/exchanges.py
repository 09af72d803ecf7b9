"""Exchange kept values for dropped ones, by simulated annealing."""

import math
from collections.abc import Sequence
from random import Random

from .simulation import Simulation

_HOT = 0.02  # temperature at the beginning, as a share of the seconds to recompute values
_COLD = 0.001  # and at the end
_PRICE = 1.5  # at first, a peak of twice the limit costs as much as so many times the seconds to recompute values
_RISES = 1.01  # how fast this price rises while the peak is above the limit, and falls while it is not
_SWAPS = 0.6  # share of trials that keep a value and drop one; the others change up to three in any way
_NEAR = 12  # these are at most so many free values apart
_CHAIN = 1.5  # keeping a value saves at most so many times its own seconds, about
_BACK = 0.7  # go back to the best choice after this share of the trials


def annealed(
    simulation: Simulation, kept: Sequence[bool], free: Sequence[int], limit: int, trials: int
) -> Sequence[bool]:
    """The fastest choice within the limit that is found from one in a number of trials.

    Choices above the limit are taken too, at a price. The numbers drawn are the same each time.
    """
    draw = Random(0)
    best = trial = simulation.run(kept)
    scale = trial.seconds
    price = _PRICE * scale / limit
    for number in range(trials):
        if number == int(_BACK * trials):
            trial = best
        temperature = _HOT * (_COLD / _HOT) ** (number / trials)
        extra_cost = scale * temperature * -math.log(1 - draw.random())
        allowed_cost = trial.seconds + price * max(0, trial.peak - limit) + extra_cost
        changed = {i for i in _drawn_values(draw, trial.kept, free) if trial.consumers[i]}
        least_seconds = trial.seconds + sum(simulation.seconds[i] * (1 if trial.kept[i] else -_CHAIN) for i in changed)
        if changed and least_seconds <= allowed_cost:  # otherwise it is hopeless
            price *= _RISES if trial.peak > limit else 1 / _RISES
            new_kept = [is_kept != (i in changed) for i, is_kept in enumerate(trial.kept)]
            new_trial = simulation.run(new_kept)
            if new_trial.seconds + price * max(0, new_trial.peak - limit) <= allowed_cost:
                trial = new_trial
                if trial.peak <= limit and trial.seconds < best.seconds:
                    best = trial
    return best.kept


def _drawn_values(draw: Random, kept: Sequence[bool], free: Sequence[int]) -> set[int]:
    """Values to keep instead of dropping, or to drop instead of keeping."""
    position = draw.randrange(len(free))
    first = free[position]
    neighbours = free[max(0, position - _NEAR) : position + _NEAR + 1]
    if draw.random() >= _SWAPS:
        return {first, *(draw.choice(neighbours) for _ in range(draw.choice((0, 0, 1, 1, 2))))}
    opposite = [i for i in neighbours if kept[i] != kept[first]]
    return {first, draw.choice(opposite)} if opposite else {first}
