"""The levels that images have: their mean and deviation, and images with few. A 12-bit sensor's keep only 16."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from datasets.channels import stored_values
from datasets.reading import ALL_16, Range16, levels_of, pairs_of
from datasets.segmentation import SegmentationDataset
from datasets.stored import COLOURS, Stored
from datasets.workers import Progress

_FEW = 64  # levels, a quarter of them
_DECODED = 64  # images of 8 bits whose levels are looked at, or twice as many
_MEASURED = 100  # images at least, if there are as many
_RARE = 1e-3  # share of the pixels: broken pixels of a camera may have any value
_MOST_RARE = 1e-2  # of all such pixels, towards black or white
_MANY = 3e-2  # of an image's pixels that become black or white


def measured(dataset: SegmentationDataset, progress: Progress = None) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from 0 to 1, over every k-th image of a split.

    ValueError: an image cannot be read.
    """
    levels, counts = np.arange(256) / 255, np.zeros((dataset.channels, 256), np.int64)
    chosen = range(0, len(dataset), max(1, len(dataset) // _MEASURED))
    for done, index in enumerate(chosen, start=1):
        planes = np.moveaxis(dataset.read_image(index), 2, 0)
        counts += [np.bincount(plane.reshape(-1), minlength=256) for plane in planes]
        if progress is not None:
            progress(done, len(chosen))
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(axis=1)).clip(min=1 / 255)  # a channel may be constant
    return mean.round(4).tolist(), std.round(4).tolist()


def is_decoded(index: int, images: int) -> bool:
    """Whether the levels of an image are looked at, one of so many, although it has 8 bits and is decoded for that."""
    return index % max(1, images // _DECODED) == 0


class Use(NamedTuple):
    """The values that an image has, for each channel."""

    bits: int  # 8 or 16
    # Lowest and highest, without levels that hardly any pixel has. Of 16 bits, 0 and 65535 do not count if no other
    # value is near: they stand for pixels without a value. None: all are such.
    ranges: Sequence[Range16 | None]
    clipped: Sequence[float]  # share of the pixels, without such, whose 16-bit values lie outside of range16


def used(
    file: Stored, turned: bool, channels: int = COLOURS, range16: Range16 = ALL_16, shallow: bool = False
) -> Use | None:
    """The values of an image; None for 8 bits unless `shallow`, as it has to be decoded. `range16`: see `Use`."""
    values = stored_values(file, turned, channels, shallow)
    if values is None:
        return None
    bits, ranges, clipped = 8 * values.itemsize, list[Range16 | None](), list[float]()
    for plane, (low, high) in zip(np.moveaxis(values, 2, 0), pairs_of(range16, channels), strict=True):
        counts = np.bincount(plane.reshape(-1), minlength=2**bits).reshape(256, -1)  # by level
        for end in (0, -1) if bits == 16 else ():
            if counts[end].sum() == counts[end, end]:
                counts[end, end] = 0
        of_levels = counts.sum(axis=1, keepdims=True)
        beyond = np.minimum(of_levels.cumsum(), of_levels[::-1].cumsum()[::-1])[:, None]  # it and those to an end
        held = np.flatnonzero(counts * ((of_levels >= _RARE * plane.size) | (beyond > _MOST_RARE * plane.size)))
        ranges.append((int(held[0]), int(held[-1])) if len(held) else None)
        kept = counts.reshape(-1)[low : high + 1].sum() if bits == 16 else counts.sum()
        clipped.append(float((counts.sum() - kept) / plane.size))
    return Use(bits, ranges, clipped)


def doubts_of_levels(uses: Iterable[Sequence], range16: Range16, images: str, keys: str | None) -> list[str]:
    """What to do if `images`, with these `Use`s, show a network few levels or none, or are clipped.

    `range16`: see `as_levels`. `keys`: prefix of this option in messages; None: the network is trained.
    """
    every, found = [Use(*use) for use in uses], list[str]()
    for bits, given in ((8, ALL_16), (16, range16)):
        if own := [use for use in every if use.bits == bits]:
            ranges = [_span(pairs) for pairs in zip(*(use.ranges for use in own), strict=True)]
            clipped = [max(shares) for shares in zip(*(use.clipped for use in own), strict=True)]
            found += _doubts(bits, images, ranges, clipped, pairs_of(given, len(ranges)), keys)
    return found


def _span(ranges: Iterable[Range16 | None]) -> Range16 | None:
    known = [pair for pair in ranges if pair is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _doubts(
    bits: int,
    images: str,
    ranges: Sequence[Range16 | None],
    clipped: Sequence[float],
    given: Sequence[Range16],
    keys: str | None,
) -> list[str]:
    """See `doubts_of_levels`; for each channel the values of all images, the largest share, and the range."""

    def levels(values: Range16, of: Range16) -> int:
        black, white = levels_of(*of)[np.array(values) << (16 - bits)].tolist()
        return 1 + white - black

    varying = {place: pair for place, pair in enumerate(ranges) if pair is not None and pair[0] < pair[1]}
    if not varying:
        values = sorted({pair[0] for pair in ranges if pair is not None}) or [0, 65_535]
        return [
            f"{bits}-bit {images} show nothing, as each channel is {' or '.join(map(str, values))}: check the files"
        ]
    flat = [place for place in range(len(ranges)) if place not in varying and len(ranges) != COLOURS]
    said = [f"{bits}-bit {images} show nothing{_named(flat)}, which has one value: check the files"] * bool(flat)
    few = {place: count for place, pair in varying.items() if (count := levels(pair, given[place])) <= _FEW}
    outside = [place for place in varying if clipped[place] > _MANY]
    reasons, whole = [], _span(varying.values())
    assert whole is not None
    if few:
        low, high = _span(varying[place] for place in few) or whole
        where = _named(few) if len(few) < len(varying) else ""
        sees = f"use {max(few.values())} of the 256 levels that a network sees{where}"
        reasons.append(f"{sees}, as they hold values from {low} to {high}")
    if outside:
        (low, high), share = given[outside[0]], max(clipped[place] for place in outside)
        reasons.append(f"have up to {share:.0%} of an image's pixels outside of {low} to {high}, made black or white")
    if not reasons:
        return said
    wanted = [*whole]
    if any(levels(pair, whole) <= _FEW for pair in varying.values()):
        own = (varying[place] if place in (*few, *outside) else pair for place, pair in enumerate(given))
        wanted = [value for pair in own for value in pair]
    advised = f"range16=[{','.join(map(str, wanted))}]"
    cure = f"give {keys}{advised}"
    if bits == 8:
        cure = "write them with values up to 255, such as floats of 0 to 1 times 255"
    elif keys is None:
        cure = f"the training had other images; store these alike, or train another network with {advised}"
    return [*said, f"{bits}-bit {images} {', and '.join(reasons)}: {cure}"]


def _named(places: Iterable[int]) -> str:
    named = ", ".join(str(place + 1) for place in places)
    return f" in channel{'s' * (',' in named)} {named}"
