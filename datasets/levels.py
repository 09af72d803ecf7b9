"""The levels that images have: their mean and deviation, and images with few. A 12-bit sensor's keep only 16."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from datasets.reading import ALL_16, Range16, levels_of, pairs_of
from datasets.segmentation import SegmentationDataset
from datasets.stored import COLOURS
from datasets.workers import Progress

_FEW = 64  # levels, a quarter of them
_DECODED = 64  # images of 8 bits whose levels are looked at, or twice as many
_MEASURED = 100  # images at least, if there are as many
_RARE = 1e-3  # share of the pixels: broken pixels of a camera may have any value
_MOST_RARE = 1e-2  # of all such pixels, towards black or white
_MANY = 3e-2  # of an image's pixels that become black or white


def mean_and_deviation(dataset: SegmentationDataset, progress: Progress = None) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from 0 to 1, over every k-th image of a split.

    ValueError: an image cannot be read.
    """
    levels = np.arange(256) / 255
    counts = np.zeros((dataset.channels, 256), np.int64)
    chosen = range(0, len(dataset), max(1, len(dataset) // _MEASURED))
    for image_count, index in enumerate(chosen, start=1):
        planes = np.moveaxis(dataset.read_image(index), 2, 0)
        counts += [np.bincount(plane.reshape(-1), minlength=256) for plane in planes]
        if progress is not None:
            progress(image_count, len(chosen))
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(axis=1)).clip(min=1 / 255)  # a channel may be constant
    return mean.round(4).tolist(), std.round(4).tolist()


def is_decoded(index: int, images: int) -> bool:
    """Whether this image of `images` is in the sample whose levels are looked at, even if it has 8 bits."""
    return index % max(1, images // _DECODED) == 0


class Use(NamedTuple):
    """The values that an image has, for each channel."""

    bits: int  # 8 or 16
    # Lowest and highest, without levels that hardly any pixel has. Of 16 bits, 0 and 65535 do not count if no other
    # value is near: they stand for pixels without a value. None: all are such.
    ranges: Sequence[Range16 | None]
    clipped: Sequence[float]  # share of the pixels, without such, whose 16-bit values lie outside of range16


def use_of(values: np.ndarray, range16: Range16 = ALL_16) -> Use:
    """How an image uses its values, uint8 or uint16 (H, W, channels). `range16`: see `Use`."""
    planes = zip(np.moveaxis(values, 2, 0), pairs_of(range16, values.shape[2]), strict=True)
    ranges, clipped = zip(*(_use_of_channel(plane, *pair) for plane, pair in planes), strict=True)
    return Use(8 * values.itemsize, ranges, clipped)


def _use_of_channel(plane: np.ndarray, low: int, high: int) -> tuple[Range16 | None, float]:
    """The range and the clipped share of one channel, see `Use`. `low`, `high`: its range16."""
    bits = 8 * plane.itemsize
    counts = np.bincount(plane.reshape(-1), minlength=2**bits).reshape(256, -1)  # by level
    if bits == 16:
        for end in (0, -1):  # 0 and 65535: the first value of the first level, and the last of the last
            is_alone = counts[end].sum() == counts[end, end]  # in its level
            if is_alone:
                counts[end, end] = 0
    level_counts = counts.sum(axis=1, keepdims=True)
    # Of each level, the pixels of it and of all darker ones, or of all lighter ones if these are fewer.
    tail_counts = np.minimum(level_counts.cumsum(), level_counts[::-1].cumsum()[::-1])[:, None]
    is_frequent = (level_counts >= _RARE * plane.size) | (tail_counts > _MOST_RARE * plane.size)
    frequent_values = np.flatnonzero(counts * is_frequent)
    value_range = (int(frequent_values[0]), int(frequent_values[-1])) if len(frequent_values) else None
    inside_count = counts.reshape(-1)[low : high + 1].sum() if bits == 16 else counts.sum()
    return value_range, float((counts.sum() - inside_count) / plane.size)


def doubts_of_levels(uses: Iterable[Sequence], range16: Range16, images: str, keys: str | None) -> list[str]:
    """What to do if `images`, with these `Use`s, show a network few levels or none, or are clipped.

    `range16`: see `as_levels`. `keys`: prefix of this option in messages; None: the network is trained.
    """
    all_uses = [Use(*use) for use in uses]
    doubts = list[str]()
    for bits, depth_range in ((8, ALL_16), (16, range16)):
        uses_of_depth = [use for use in all_uses if use.bits == bits]
        if uses_of_depth:
            doubts += _doubts_of_depth(f"{bits}-bit {images}", uses_of_depth, depth_range, keys)
    return doubts


def _doubts_of_depth(images: str, uses: Sequence[Use], range16: Range16, keys: str | None) -> Iterator[str]:
    """`doubts_of_levels` for images of equally many bits."""
    ranges = [_span(pairs) for pairs in zip(*(use.ranges for use in uses), strict=True)]  # of each channel
    range16s = pairs_of(range16, len(ranges))
    varying = {place: pair for place, pair in enumerate(ranges) if pair is not None and pair[0] < pair[1]}
    if not varying:
        values = sorted({pair[0] for pair in ranges if pair is not None}) or [0, 65_535]
        yield f"{images} show nothing, as each channel is {' or '.join(map(str, values))}: check the files"
        return
    flat = [place for place in range(len(ranges)) if place not in varying and len(ranges) != COLOURS]
    if flat:
        yield f"{images} show nothing{_in_channels(flat)}, which has one value: check the files"
    bits = uses[0].bits
    level_counts = {place: _level_count(pair, range16s[place], bits) for place, pair in varying.items()}
    few = {place: count for place, count in level_counts.items() if count <= _FEW}
    shares = [max(of_images) for of_images in zip(*(use.clipped for use in uses), strict=True)]
    clipped = {place: shares[place] for place in varying if shares[place] > _MANY}
    reasons = []
    if few:
        reasons.append(_few_levels_text(few, varying))
    if clipped:
        low, high = range16s[min(clipped)]
        share = max(clipped.values())
        reasons.append(f"have up to {share:.0%} of an image's pixels outside of {low} to {high}, made black or white")
    if reasons:
        advised = _advised_range16(varying, range16s, {*few, *clipped})
        yield f"{images} {', and '.join(reasons)}: {_cure(bits, advised, keys)}"


def _few_levels_text(few: Mapping[int, int], varying: Mapping[int, Range16]) -> str:
    """What images do whose channels show `few` levels, {place: levels}. `varying`: {place: range} of all that vary."""
    low, high = _span(varying[place] for place in few) or ALL_16
    channels = _in_channels(few) if len(few) < len(varying) else ""
    use = f"use {max(few.values())} of the 256 levels that a network sees{channels}"
    return f"{use}, as they hold values from {low} to {high}"


def _cure(bits: int, advised: str, keys: str | None) -> str:
    """What to do about images of so many bits. `advised`: a setting; `keys`: see `doubts_of_levels`."""
    if bits == 8:
        return "write them with values up to 255, such as floats of 0 to 1 times 255"
    if keys is None:
        return f"if the training had other images, store these alike; else train another network with {advised}"
    return f"give {keys}{advised}"


def _level_count(values: Range16, range16: Range16, bits: int) -> int:
    """The number of levels from the lowest to the highest of these values of so many bits."""
    darkest, lightest = levels_of(*range16)[np.array(values) << (16 - bits)].tolist()
    return 1 + lightest - darkest


def _advised_range16(varying: Mapping[int, Range16], range16s: Sequence[Range16], unfit: Set[int]) -> str:
    """The setting by which channels show enough levels: one range for all, or else others for `unfit` channels."""
    whole = _span(varying.values()) or ALL_16
    values = [*whole]
    if any(_level_count(pair, whole, bits=16) <= _FEW for pair in varying.values()):
        pairs = (varying[place] if place in unfit else pair for place, pair in enumerate(range16s))
        values = [value for pair in pairs for value in pair]
    return f"range16=[{','.join(map(str, values))}]"


def _span(ranges: Iterable[Range16 | None]) -> Range16 | None:
    pairs = [pair for pair in ranges if pair is not None]
    return (min(low for low, _ in pairs), max(high for _, high in pairs)) if pairs else None


def _in_channels(places: Iterable[int]) -> str:
    numbers = [str(place + 1) for place in places]
    return f" in {'channel' if len(numbers) == 1 else 'channels'} {', '.join(numbers)}"
