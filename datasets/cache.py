"""The cache folder. Everything in it can be made again: synthetic images, class indices, checks."""

import fcntl
import os
import shutil
import stat
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

_NAME = "inplace-abn-segmentation"


def cache_folder() -> Path | None:
    """`inplace-abn-segmentation` in $XDG_CACHE_HOME, by default in ~/.cache. It may not exist yet.

    For users without a home, whom containers may have, it is a private folder in the folder for temporary files;
    None if there is no such folder.
    """
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not above.startswith("~"):
        return Path(above) / _NAME
    with suppress(OSError):
        return make_private(Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}")
    return None


def require_cache_folder(user: str, instead: str) -> Path:
    """`cache_folder`; ValueError if there is none. The message names `user`, what needs it, and ends with `instead`."""
    folder = cache_folder()
    if folder is None:
        raise ValueError(
            f"{user} has no cache folder: this user has no home, and {_NAME}-{os.getuid()} in the folder for temporary "
            f"files is not this user's own; {instead}"
        )
    return folder


def make_private(folder: Path) -> Path | None:
    """Make a folder that only this user may enter; None if another folder, or something else, has its name.

    Several processes may make it at once. OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    state = os.lstat(folder)
    parent_mode = os.stat(folder.parent).st_mode
    is_replaceable = parent_mode & stat.S_IWOTH and not parent_mode & stat.S_ISVTX  # by anybody
    is_private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077
    return folder if is_private and not is_replaceable else None


@contextmanager
def alone_in(folder: Path, partial: str) -> Iterator[None]:
    """Context for writing into a folder of the cache: one process at a time, if the file system has locks.

    Files and folders whose names begin with `partial`, which killed processes left there, are removed. No link is
    followed, not even `folder`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network folder without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for path in () if folder.is_symlink() else folder.iterdir():
                if path.name.startswith(partial):
                    _remove(path)
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a folder and all in it, or a file or link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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
