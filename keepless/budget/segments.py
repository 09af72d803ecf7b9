"""Choices that cut a step into segments, as checkpoints of whole blocks do: inside a segment nothing is kept."""

from collections.abc import Iterator

from .step import Kind, Step

_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def segmented(step: Step) -> Iterator[list[bool]]:
    """Choices of kept values, from few long segments to many short ones; a choice has an entry for each value.

    The forward pass is cut where fewer bytes are handed on than shortly before and after, which is between its blocks.
    What is handed on there is kept, and all else is computed again from it.
    """
    handed = _handed_on(step)
    sizes = [sum(step.memories[memory] for memory in {step.values[i].memory for i in one}) for one in handed]
    cuts = [
        i
        for i in range(1, len(handed) - 1)
        if 0 < sizes[i] < sizes[i - 1] and sizes[i] <= next((size for size in sizes[i:] if size != sizes[i]), 0)
    ]
    inside = [0]  # bytes of the results before each value
    for value in step.values:
        inside.append(inside[-1] + (value.bytes if value.kind == Kind.FREE else 0))
    seen: set[tuple[int, ...]] = set()
    for count in _SEGMENTS:
        chosen, since = [], 0
        for cut in cuts:
            if inside[cut] - since >= inside[-1] / count:
                chosen.append(cut)
                since = inside[cut]
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            kept = [value.kind == Kind.KEPT for value in step.values]
            for i in set().union(*(handed[cut] for cut in chosen)):
                kept[i] = True
            yield kept


def _handed_on(step: Step) -> list[set[int]]:
    """For each value: the results, up to this one, that later recipes read."""
    sources: list[set[int]] = []  # the results that a value is made of, through views and the like
    last: dict[int, int] = {}  # the last value whose recipe reads a result
    for number, value in enumerate(step.values):
        read = set().union(*(sources[i] for i in value.inputs))
        for i in read:
            last[i] = number
        sources.append({number} if value.kind == Kind.FREE else read)
    handed: list[set[int]] = []
    now: set[int] = set()
    for number, value in enumerate(step.values):
        if value.kind == Kind.FREE:
            now.add(number)
        now = {i for i in now if last.get(i, -1) > number}
        handed.append(set(now))
    return handed
