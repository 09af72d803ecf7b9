"""Find 16-bit images that would reach the network with few of 256 levels. A 12-bit sensor's keep only 16."""

from collections.abc import Sequence

import numpy as np

from datasets.reading import Range16, Stored, levels_of, values16

_FEW = 64  # levels, a quarter of them
_RARE = 1e-3  # share of the pixels: broken pixels of a camera may have any value


def used16(file: Stored, turned: bool) -> Range16 | None:
    """The lowest and highest value of a 16-bit image, without levels that hardly any pixel has; None for 8 bits.

    0 and 65535 do not count if no other value is near: they stand for pixels without a value. None if all are such.
    """
    values = values16(file, turned)
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
