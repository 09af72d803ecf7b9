"""The cache folder. Everything in it can be made again: synthetic images, class indices, checks."""

import fcntl
import os
import shutil
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np


def cache_folder() -> Path:
    """`inplace-abn-segmentation` in $XDG_CACHE_HOME, by default in ~/.cache. It may not exist yet.

    For users without a home, whom containers may have, it is in the folder for temporary files.
    """
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if above.startswith("~"):
        return Path(tempfile.gettempdir()) / f"inplace-abn-segmentation-{os.getuid()}"
    return Path(above) / "inplace-abn-segmentation"


@contextmanager
def alone_in(folder: Path, partial: str) -> Iterator[None]:
    """Context for writing into a folder of the cache: one process at a time, if the file system has locks.

    Files and folders whose names begin with `partial`, which killed processes left there, are removed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network folder without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in [path for path in folder.iterdir() if path.name.startswith(partial)]:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(descriptor)


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
    with alone_in(file.parent, f".{file.stem}-"):
        try:
            np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
            os.replace(partial, file)
        except BaseException:  # Ctrl-C as well
            partial.unlink(missing_ok=True)
            raise
