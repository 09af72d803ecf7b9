"""Parse and write sizes such as 6GiB, and parse shares such as 50%."""

import re

__all__ = ["UNITS", "bytes_of", "share_of", "size_text"]

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()}  # the case of a unit does not change its meaning


def bytes_of(text: str) -> int | None:
    """The number of bytes in a text such as 6GiB, 1.5 MiB or 900 KB; None for any other text.

    12G has no meaning: it may be 12GB or 12GiB.
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) *({'|'.join(_FACTORS)})", text.strip().lower(), re.ASCII)
    return round(float(match[1]) * _FACTORS[match[2]]) if match else None


def share_of(text: str) -> float | None:
    """The share in a text such as 50% or 0.5; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *%|(\d?\.\d+)", text.strip(), re.ASCII)
    if match is None:
        return None
    percent, share = match.groups()
    return float(percent) / 100 if percent else float(share)


def size_text(count: int) -> str:
    """Bytes in readable form, such as 1.50 GiB, 20.0 MiB or 0.5 KiB."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count / 2**10:.1f} KiB"
