"""How many of the 256 levels that a network sees 16-bit images use: those of 12-bit sensors, for example, use 16."""

import numpy as np

from datasets.reading import ALL_16, Range16, Stored, levels_of, values16

_FEW = 64  # levels, a quarter of them
_RARE = 1e-4  # share of the pixels: broken pixels of a camera may be black or white


def count16(file: Stored, turned: bool) -> np.ndarray | None:
    """How often an image holds each 16-bit value, int64 (65536,); None if it has 8 bits."""
    values = values16(file, turned)
    return None if values is None else np.bincount(values.reshape(-1), minlength=ALL_16[1] + 1)


def used16(counts: np.ndarray) -> Range16 | None:
    """The lowest and the highest value, without rare ones far away from the others; None if there is only one."""
    of_levels = counts.reshape(256, 256)
    common = of_levels.sum(axis=1, keepdims=True) >= _RARE * counts.sum()
    held = np.flatnonzero(of_levels * common)
    return (int(held[0]), int(held[-1])) if len(held) > 1 else None


def doubts16(used: Range16 | None, range16: Range16, images: str, keys: str) -> list[str]:
    """What to do if `images` use few levels. `used`: see `used16`; `range16`: see `decode_image`.

    `keys`: prefix of the option range16 in the message.
    """
    if used is None:
        return []
    black, white = levels_of(range16)[[*used]].tolist()
    if (levels := 1 + white - black) > _FEW:
        return []
    low, high = used
    return [
        f"16-bit {images} use {levels} of the 256 levels that a network sees, as they hold values from {low} to "
        f"{high}: give {keys}range16=[{low},{high}]"
    ]
