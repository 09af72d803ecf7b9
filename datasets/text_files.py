"""Read text files that somebody else may have written: no size, nesting or pipe stops the reader."""

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**28  # more than any file of ours


def read_text(file: Path) -> str:
    """The text of a file. OSError; ValueError if it is no regular file, not UTF-8, or of more than 256 MiB."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is a folder, pipe or device: expected a file")
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{file} has {size:,} bytes: expected at most {_MOST_BYTES:,}")
    return file.read_text(encoding="utf-8-sig")


def read_json(file: Path) -> Any:
    """The content of a JSON file. OSError, ValueError: see `read_text` and `parsed`."""
    return parsed(read_text(file))


def parsed(text: str) -> Any:
    """The content of a JSON text. ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
