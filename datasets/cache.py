"""The cache folder. Everything in it can be made again: drawn images, class indices, checks."""

import os
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np


def cache_folder() -> Path:
    """`inplace-abn-segmentation` in $XDG_CACHE_HOME, by default in ~/.cache. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inplace-abn-segmentation"


def read_arrays(file: Path, names: Iterable[str]) -> list[np.ndarray] | None:
    """Load what `write_arrays` wrote; None if the file is missing, damaged (it has checksums) or lacks an array."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a temporary file and rename it: readers never see half a file, and two writers write the same content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}-{uuid.uuid4().hex}.npz")
    try:
        np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
        os.replace(partial, file)
    except BaseException:  # Ctrl-C as well
        partial.unlink(missing_ok=True)
        raise
