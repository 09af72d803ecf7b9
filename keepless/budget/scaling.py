"""Scale a step to another size of its inputs, from steps of the same calls on other sizes."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .step import Event, Step

_EXACT = 1e-3  # a predicted size may be off by so much of it
_REFERENCES = 7  # steps of one kind of input that are remembered


class Sized(NamedTuple):
    """A step, and all dimensions of the inputs that it was made with."""

    dims: tuple[int, ...]
    step: Step


def remember(known: list[Sized], one: Sized) -> None:
    """Add a step to those known; the smallest, the largest and the newest stay."""
    known.append(one)
    if len(known) > _REFERENCES:
        known.remove(sorted(known[:-1])[len(known) // 2])


def scaled(known: Sequence[Sized], dims: tuple[int, ...]) -> Step | None:
    """The step for inputs of these dimensions; None if that cannot be told.

    It can if one number varies, such as the length of texts, which may be several dimensions. Bytes, operations and
    dimensions inside are then polynomials of it: three steps, with smaller and larger ones, say which, and a fourth
    must agree. Temporary bytes and seconds, which are measured, lie on a straight line between the next two.
    """
    size, steps = _along(known, dims)
    if len(steps) >= 4:
        nearest = min(steps, key=lambda one: abs(one[0] - size))
        structure = _structure(nearest[1])
        steps = [one for one in steps if one is nearest or _structure(one[1]) == structure]
    sizes = [one for one, _ in steps]
    if len(steps) < 4 or not sizes[0] < size < sizes[-1]:
        return None
    corners, (checked, other) = [steps[0], steps[len(steps) // 2], steps[-1]], steps[len(steps) // 2 - 1]
    expected = _sizes(other)
    if any(abs(a - b) > _EXACT * max(b, 1) for a, b in zip(_between(corners, checked, _sizes), expected, strict=True)):
        return None
    above = next(number for number, one in enumerate(sizes) if one > size)
    return _with(steps[0][1], _between(corners, size, _sizes), _between(steps[above - 1 : above + 1], size, _costs))


def _along(known: Sequence[Sized], dims: tuple[int, ...]) -> tuple[int, list[tuple[int, Step]]]:
    """The number that varies, and the steps for other numbers, by size."""
    found: dict[tuple[int, ...], dict[int, Step]] = defaultdict(dict)  # by the places where it stands
    for other, step in known:
        places = tuple(i for i, (a, b) in enumerate(zip(dims, other, strict=True)) if a != b)
        if len({dims[i] for i in places}) == len({other[i] for i in places}) == 1:
            found[places][other[places[0]]] = step
    places, steps = max(found.items(), key=lambda item: len(item[1]), default=((), {}))
    return (dims[places[0]] if places else 0), sorted(steps.items())


def _between(points: Sequence[tuple[int, Step]], size: int, numbers: Callable[[Step], list[float]]) -> list[float]:
    """The polynomial through these points (Lagrange), for each number of a step."""
    weights = []
    for at, _ in points:
        weight = 1.0
        for other, _ in points:
            weight *= (size - other) / (at - other) if other != at else 1.0
        weights.append(weight)
    columns = zip(*(numbers(step) for _, step in points), strict=True)
    return [sum(weight * number for weight, number in zip(weights, column, strict=True)) for column in columns]


def _sizes(step: Step) -> list[float]:
    """What depends on shapes alone."""
    return [
        *step.memories,
        *(number for value in step.values for number in (value.bytes, value.operations)),
        *(number for saved in step.saved for number in (saved.signs, saved.unpacking)),
        *(number for _, shape, _ in step.calls for number in shape),
    ]


def _costs(step: Step) -> list[float]:
    """What is measured."""
    return [
        *(number for value in step.values for number in (value.busy, value.seconds)),
        *(what for event, what in step.events if event == Event.BUSY),
    ]


def _structure(step: Step) -> Any:
    """What steps have in common whatever their size."""
    return (
        [value._replace(bytes=0, operations=0, busy=0, seconds=0.0) for value in step.values],
        [saved._replace(signs=0, unpacking=0) for saved in step.saved],
        [(event, 0 if event == Event.BUSY else what) for event, what in step.events],
        [(function, len(shape), dtype) for function, shape, dtype in step.calls],
        step.forward,
    )


def _with(step: Step, sizes: Sequence[float], costs: Sequence[float]) -> Step:
    """A step with other sizes and costs, in the order of `_sizes` and `_costs`."""
    whole, taken = iter(map(round, sizes)), iter(costs)
    memories = [next(whole) for _ in step.memories]
    values = [value._replace(bytes=next(whole), operations=next(whole)) for value in step.values]
    saved = [save._replace(signs=next(whole), unpacking=next(whole)) for save in step.saved]
    calls = [(function, type(shape)([next(whole) for _ in shape]), dtype) for function, shape, dtype in step.calls]
    values = [value._replace(busy=round(next(taken)), seconds=next(taken)) for value in values]
    events = [(event, round(next(taken)) if event == Event.BUSY else what) for event, what in step.events]
    return Step(values, memories, saved, events, step.forward, calls, step.unseen)
