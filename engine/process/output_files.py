"""Write all files except checkpoints (engine/checkpoint/files.py); errors name the file."""

import errno
import fcntl
import hashlib
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = "Make the folder and its files writable (or readable: owner, permissions, chattr -i, how it is mounted)"
_CURES = {
    **dict.fromkeys(NO_ROOM, "Make room there (or raise the quota or limit)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Move the file away that is in the place of a folder"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n), or close other programs"),
    errno.ELOOP: "A link leads back to itself; remove it, or let it lead to the file",
}
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
        raise OSError(error.errno, reason_of(error, path.parent), str(path)) from error


def replace_file(path: Path, content: str) -> None:
    """Write a file like `write_file`; a full disk or a kill leaves the old file or the complete new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as file:
            file.write(content.encode(errors="backslashreplace"))
            file.flush()
            os.replace(file.name, path)
    except OSError as error:
        raise OSError(error.errno, reason_of(error, path.parent), str(path)) from error


@contextmanager
def partial_file(path: Path, others: str = "") -> Iterator[IO[bytes]]:
    """Context with a new file beside `path`, which the caller writes and renames to it; an error removes it.

    Partial files that killed processes left are removed: those of `path`, or those that match the pattern `others`.
    Each is locked while it is written, so several processes may write the same file: the last one stays.
    """
    name = short_name(path.name, ".partial-" + 16 * "0")
    for left in path.parent.iterdir():
        if re.fullmatch(others or rf"{re.escape(name)}\.partial-[0-9a-f]{{16}}", left.name):
            with suppress(OSError), open(left, "r+b") as unfinished:
                if _lock(unfinished):
                    left.unlink()
    file: IO | None = None
    while file is None or not (_lock(file) and os.path.exists(file.name)):  # another process has just removed it
        file = open(path.with_name(f"{name}.partial-{uuid.uuid4().hex[:16]}"), "xb")
    try:
        with file:
            yield file
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        raise


def _lock(file: IO) -> bool:
    """Lock a file until it is closed. False: another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # or the file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def no_inodes(error: OSError, folder: Path) -> bool:
    """Whether a disk takes no more files, however small; the system says that it has no space."""
    with suppress(OSError):
        room = os.statvfs(folder)
        return error.errno == errno.ENOSPC and room.f_files > 0 == room.f_favail
    return False


def reason_of(error: OSError, folder: Path) -> str:
    """The system's words for an error of writing into a folder."""
    return "No inodes left on device" if no_inodes(error, folder) else error.strerror or str(error)


def cure_of(error: OSError, folder: Path, unknown: str = "Check the disk or the connection to it") -> str:
    """What to do about an error of a file in a folder."""
    many = "Remove files there: the disk is full of small ones (df -i), whatever space it has"
    return many if no_inodes(error, folder) else _CURES.get(error.errno or 0, unknown)


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
