"""Write all files except checkpoints (engine/checkpoint/files.py); errors name the file."""

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_NAME = 255  # bytes of a file's name, on nearly every disk
_WRITERS = 4  # threads
_MOST_BYTES = 2**28  # of what waits to be written

T = TypeVar("T")


def writable_folder(key: str, folder: Path) -> Path:
    """Create a folder if needed and return it. ValueError, naming `key`, if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{key}: {folder} is not a writable folder ({error.strerror}); give another with {key}=…"
        ) from error
    return folder


def writable_file(key: str, file: Path, *sources: Path) -> None:
    """Create a file's folder if needed. ValueError, naming `key`: not writable, or `file` is a folder or in `sources`.

    Devices such as /dev/null are refused too: root would replace them by a file.
    """
    if file.exists():
        is_source = any(source.exists() and file.samefile(source) for source in sources)
        what = "a folder" if file.is_dir() else "the input" if is_source else "" if file.is_file() else "a device"
        if what:
            raise ValueError(f"{key}={file} is {what}: give another file")
    writable_folder(key, file.parent)


def check_outside(key: str, folder: Path, images: Iterable[Path]) -> None:
    """Raise ValueError, naming `key`, if a folder is or lies in one of a dataset's image folders, `images`."""
    for place in images:
        if place.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(
                f"{key}={folder} lies in {place}, the images of a dataset, which would then have images without a "
                f"label: give a folder outside of it"
            )


def short_name(name: str, suffix: str = ".png") -> str:
    """A file's name without its suffix, perhaps below folders, cut so that a disk takes it with `suffix`.

    A name that is cut ends in a number made of the whole name: it stays unique, whichever other files there are.
    """
    folder, slash, own = name.rpartition("/")
    room = _LONGEST_NAME - len(suffix)
    if len(os.fsencode(own)) <= room:
        return name
    number = "~" + hashlib.sha256(os.fsencode(own)).hexdigest()[:16]
    return folder + slash + os.fsencode(own)[: room - len(number)].decode(errors="ignore") + number


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, and create its folder. OSError names the file, of which no part is left."""
    file: IO | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:  # it names no file if the disk is full or fails
        if file is not None and path.is_file():  # not a device
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: Path, content: str) -> None:
    """Write a file like `write_file`; a full disk or a kill leaves the old file or the complete new one."""
    partial = path.with_name(f"{path.name}.partial")
    write_file(partial, content)
    partial.replace(path)


def write_figure(path: Path, figure: Figure, dpi: int, few_colours: bool = False) -> None:
    """Write a figure as a PNG, like `write_file`. `few_colours`, for charts, saves two thirds of the bytes."""
    encoded = BytesIO()
    figure.savefig(encoded, dpi=dpi)
    if few_colours:
        palette = Image.open(encoded).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette.save(encoded := BytesIO(), "PNG", optimize=True)
    write_file(path, encoded.getvalue())


def png(pixels: np.ndarray, palette: np.ndarray | None = None) -> bytes:
    """A PNG of uint8 (H, W) or RGB (H, W, 3) pixels.

    `palette`: uint8 (256, 3) RGB, for a palette PNG with indices `pixels` (H, W).
    """
    image, encoded = Image.fromarray(pixels), BytesIO()
    if palette is not None:
        image.putpalette(palette.tobytes())  # unlike convert("P"), keeps the indices
    image.save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def npy(values: np.ndarray) -> bytes:
    """An array as NumPy's .npy file."""
    encoded = BytesIO()
    np.save(encoded, values)
    return encoded.getvalue()


class WrittenBehind:
    """Context in which other threads make the contents of files, and write them in the order in which they were given.

    An error ends it: `add` or the end of the context raises it, and nothing that was added later is written. After an
    error of the caller what was added is written; after Ctrl-C only what has begun.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._waiting: deque[tuple[Future, int]] = deque()  # with their bytes, oldest first

    def add(self, make: Callable[[], T], write: Callable[[T], None], size: int) -> None:
        """Call `write(make())`, where `make` may run beside others. Waits while more than `_MOST_BYTES` are held.

        `size`: how many bytes both hold in memory.
        """
        before = self._waiting[-1][0] if self._waiting else None

        def run() -> None:
            made = make()
            if before is not None:
                before.result()  # its error is ours
            write(made)

        self._waiting.append((self._pool.submit(run), size))
        while len(self._waiting) > _WRITERS or (self._waiting and sum(each for _, each in self._waiting) > _MOST_BYTES):
            self._waiting.popleft()[0].result()

    def __enter__(self) -> "WrittenBehind":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._waiting and (kind is None or issubclass(kind, Exception)):
                self._waiting.popleft()[0].result()
        finally:
            self._pool.shutdown(cancel_futures=True)
