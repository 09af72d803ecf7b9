"""The levels that images have: their mean and deviation, and 16-bit images with few. A 12-bit sensor's keep only 16."""

from collections.abc import Sequence

import numpy as np

from datasets.channels import deep_values
from datasets.reading import COLOURS, Range16, Stored, levels_of
from datasets.segmentation import SegmentationDataset
from datasets.workers import Progress

_FEW = 64  # levels, a quarter of them
_MEASURED = 100  # images at least, if there are as many
_RARE = 1e-3  # share of the pixels: broken pixels of a camera may have any value


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


def used16(file: Stored, turned: bool, channels: int = COLOURS) -> Range16 | None:
    """The lowest and highest value of a 16-bit image, without levels that hardly any pixel has; None for 8 bits.

    0 and 65535 do not count if no other value is near: they stand for pixels without a value. None if all are such.
    """
    values = deep_values(file, turned, channels)
    if values is None:
        return None
    counts = np.bincount(values.reshape(-1), minlength=65_536).reshape(256, 256)  # by level
    for end in (0, -1):
        if counts[end].sum() == counts[end, end]:
            counts[end, end] = 0
    held = np.flatnonzero(counts * (counts.sum(axis=1, keepdims=True) >= _RARE * values.size))
    return (int(held[0]), int(held[-1])) if len(held) else None


def doubts16(used: Sequence[Range16], range16: Range16, images: str, keys: str) -> list[str]:
    """What to do if `images`, which use these values, use few levels. `range16`: see `decode_image`.

    `keys`: prefix of the option range16 in the message.
    """
    if not used:
        return []
    low, high = min(low for low, _ in used), max(high for _, high in used)
    black, white = levels_of(*range16)[[low, high]].tolist()
    if low == high or white - black >= _FEW:
        return []
    return [
        f"16-bit {images} use {1 + white - black} of the 256 levels that a network sees, as they hold values from "
        f"{low} to {high}: give {keys}range16=[{low},{high}]"
    ]
