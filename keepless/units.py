"""Parse sizes such as 6GiB."""

import re

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str) -> int | None:
    """The number of bytes in a text such as 6GiB or 1.5 MiB; None for any other text."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text.strip(), re.ASCII)
    return round(float(match[1]) * UNITS[match[2]]) if match else None
