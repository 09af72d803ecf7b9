"""What looks odd in the values of labels: stretched levels, smoothed edges, instances instead of classes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from itertools import pairwise

import numpy as np

from datasets.class_table import ranges

WHITE = 255


def is_evenly_spread(held: Set[int]) -> bool:
    """Whether values are the parts of 0 to 255, such as 0, 127 and 255, and few of the parts are missing."""
    smallest = min((other - one for one, other in pairwise(sorted(held))), default=0)
    parts = round(WHITE / smallest) if smallest >= 8 and len(held) > 2 else 0
    near = all(abs(value - WHITE * round(value * parts / WHITE) / parts) < 2 for value in held) if parts else False
    return WHITE in held and near and 2 * len(held) > parts


def instances(holding: Mapping[int, int], labels: int) -> Iterator[str]:
    """A doubt if nearly every id or colour is in one label alone. `holding`: the labels that hold each."""
    alone = sum(count == 1 for count in holding.values())
    if labels >= 4 and len(holding) >= 8 and alone >= 0.9 * len(holding):
        yield f"{alone} of {len(holding)} ids or colours are in one label each: they look like instances, not classes"


def smoothed(pixels: Counter[int], between: Mapping[int, int]) -> Iterator[str]:
    """A doubt if rare values lie mostly beside others in space and value, and the frequent ones are apart."""
    most = max(pixels.values())
    rare = {v for v, n in pixels.items() if max(between[v], between[0x010101 * v]) >= 0.75 * n and n < most / 5}
    frequent = np.array([[v >> 16, v >> 8, v] for v, n in pixels.items() if v not in rare and n >= most / 50]) & WHITE
    apart = abs(frequent[:, None] - frequent).max(axis=2) + 999 * np.eye(len(frequent), dtype=int)
    if rare and len(frequent) > 1 and apart.min() >= (3 if len(rare) > 1 else 8):
        yield (
            f"{len(rare)} values, such as {ranges(sorted(rare)[:3])}, lie beside frequent ones in space and value, "
            f"as if JPEG or resizing had smoothed the labels: save them as PNG, and resize with nearest neighbour"
        )


def between(raw: np.ndarray) -> Counter[int]:
    """The pixels of each value that are less than 8 in a row or column, and as at smoothed edges.

    Each channel lies between its two neighbours in the row or column, or within 4 levels of one of them.
    """
    levels = np.stack([raw >> 16, raw >> 8, raw], axis=-1) & WHITE if raw.dtype == np.int32 else raw[..., None]
    found = np.zeros(raw.shape, bool)
    for values, channels, mask in ((raw, levels, found), (raw.T, levels.swapaxes(0, 1), found.T)):
        new, width = np.ones(values.shape, bool), values.shape[1]
        new[:, 1:] = values[:, 1:] != values[:, :-1]
        starts = np.flatnonzero(new)
        runs, lengths = channels[new].astype(int), np.diff(starts, append=values.size)
        inside = (starts % width > 0) & ((starts + lengths) % width > 0) & (lengths < 8)
        down, up = runs - np.roll(runs, 1, axis=0), np.roll(runs, -1, axis=0) - runs
        near = np.minimum(abs(down).max(axis=1), abs(up).max(axis=1)) <= 4
        smooth = inside & (near | ((down * up >= 0).all(axis=1) & (down + up).any(axis=1)))
        mask |= np.repeat(smooth, lengths).reshape(values.shape)
    values, counts = np.unique(raw[found], return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def has_large_gaps(ids: Set[int]) -> bool:
    """Whether the largest id is high and far more ids below it are missing than present."""
    return max(ids) >= 64 and max(ids) + 1 > len(ids) + max(8, 3 * len(ids))


def has_smoothed_edges(pixels: Counter[int]) -> bool:
    """Whether masks in black and white seem to have gray edges: many values, with gaps, in few pixels.

    Resizing and JPEG also change pixels far from the edges by a few levels, to values that no class has beside white.
    """
    between = [value for value in pixels if 0 < value < WHITE]
    if len(between) < 8 or max(between) == len(between):
        return False
    near = 8 if max(between) > WHITE - 8 else 1  # levels that count as black, or as white
    gray = sum(count for value, count in pixels.items() if near <= value <= WHITE - near)
    return gray < sum(count for value, count in pixels.items() if value > WHITE - near)
