"""Write all files except checkpoints (engine/checkpoint/files.py); errors name the file.

A file that is there already is replaced only if a command of ours wrote it: a mark in it, or a list beside it, says so.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

LIST = "written.json"  # of the pictures that a command wrote into a folder
_ABOUT = "the files below were written by a command, which may replace them"  # in the list
NO_INODES = "No inodes left on device"
CHECK_DISK = "Check the disk or the connection to it"
# What a command may replace, because one of ours wrote it: by kind, regular expressions that are all in the file.
_OURS = {
    "list of files": (_ABOUT.encode(),),
    "results": (rb'\A\{\s*"dataset": "[^"]*",\s*"split": ', rb'"environment": \{'),
    "scores of images": (rb"\Aname,miou_of_image,",),
    "problems": (rb'\A\{\s*"dataset": "[^"]*",\s*"problems": ',),  # of verify_data
    "network": (b"scripts.convert_checkpoint",),
    "program": (rb'"ignore_index": ', rb'"range16": '),  # of export
    "copy of a run": (rb'"run_dir": "DIR"',),
    "comparison": (rb"python -m scripts\.compare_runs",),
    "lists": (b"as scripts.make_classes wrote the lists beside this file",),
    "class list": (rb'\A\[\n\{"id": \d+, "name": ',),
    "likeliest classes": (rb"\Aimage(,class1,probability1|\n)",),
    "page of predictions": (rb"\A<!doctype html>\n[^\n]*\n<style>\n:root \{ --opacity: ",),
    "record": (rb'\A\{\s*"calls": \[',),  # of a benchmark
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = "Make the folder and its files writable (or readable: owner, permissions, chattr -i, how it is mounted)"
_CURES = {
    **dict.fromkeys(NO_ROOM, "Make room there (or raise the quota or limit)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Move the file away that is in the place of a folder"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n), or close other programs"),
    errno.ELOOP: "Remove the link, which leads back to itself or is where none may be",
}
_SUFFIXES_OF_FILES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".npy", ".csv", ".json", ".html", ".pdf")
_LONGEST_NAME = 255  # bytes of a file's name, on nearly every disk
_WRITERS = 4  # threads
_MOST_BYTES = 2**28  # of what waits to be written

T = TypeVar("T")


def writable_folder(key: str, folder: Path) -> Path:
    """Create a folder if needed and return it. ValueError, naming `key`: it is not writable, or has a file's suffix."""
    if folder.suffix.lower() in _SUFFIXES_OF_FILES and not folder.is_dir():
        raise ValueError(
            f"{key}={folder}: expected a folder, which gets several files: give {key}={folder.with_suffix('')}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{key}: {folder} is not a writable folder ({error.strerror}); give another with {key}=…"
        ) from error
    return folder


def writable_file(key: str, file: Path, *sources: Path, kind: str | None = None) -> None:
    """Create a file's folder if needed. ValueError, naming `key`: not writable, or what is there would be lost.

    `sources`: the command's inputs. `kind`: what the command writes; it may replace such a file (see `is_ours`), and
    an empty one.
    """
    if os.path.lexists(file):
        obstacle = _obstacle(file, sources)
        if obstacle:
            raise ValueError(f"{key}={file} is {obstacle}: give another file")
        if file.stat().st_size and not (kind and is_ours(file, kind)):
            raise ValueError(
                f"{key}={file} was not written by this command, and would be lost: give another file, or remove it"
            )
    writable_folder(key, file.parent)


def _obstacle(path: Path, sources: Iterable[Path]) -> str:
    """What is at a path, if no command may replace it; "" if it is a file."""
    if not path.exists():
        return "a link that leads nowhere"
    if path.is_dir():
        return "a folder"
    if any(source.exists() and path.samefile(source) for source in sources):
        return "the input"
    return "" if path.is_file() else "a device"


def is_ours(file: Path, kind: str) -> bool:
    """Whether a file is of a kind that our commands write."""
    if not (file.is_file() and file.stat().st_size):
        return False
    with open(file, "rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return all(re.search(mark, view) for mark in _OURS[kind])


def claim_folder(key: str, folder: Path, names: Collection[str]) -> Path:
    """Make a folder for files, and add their names to its list before the first is written. Ranks may do so at once.

    ValueError, naming `key`: the folder is not writable, or holds some of the files although its list does not.
    """
    existing_names = [name for name in names if os.path.lexists(folder / name)]
    file = folder / LIST
    writable_file(key, file, kind="list of files")  # another rank may just have written it, and files
    listed_names = {*json.loads(file.read_text())["files"]} if file.is_file() else set()
    foreign = [name for name in existing_names if name not in listed_names]
    if foreign:
        remaining = f" and {len(foreign) - 1} others" if len(foreign) > 1 else ""
        raise ValueError(
            f"{key}={folder} holds {foreign[0]}{remaining}, which would be replaced: no {LIST} says that a command "
            f"wrote them. Give another folder, or remove them"
        )
    if not listed_names.issuperset(names):
        content = {"about": _ABOUT, "files": sorted(listed_names.union(names))}
        write_file(file, json.dumps(content, indent=0) + "\n")
    return folder


def check_outside(key: str, folder: Path, images: Iterable[Path]) -> None:
    """Raise ValueError, naming `key`, if a folder is or lies in one of a dataset's image folders, `images`."""
    for image_folder in images:
        if image_folder.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(
                f"{key}={folder} lies in {image_folder}, the images of a dataset, to which pictures would be added: "
                f"give a folder outside of it"
            )


def short_name(name: str, suffix: str = ".png") -> str:
    """A file's name without its suffix, perhaps below folders, cut so that a disk takes it with `suffix`.

    A name that is cut ends in a number made of the whole name: it stays unique, whichever other files there are.
    """
    folder, slash, file_name = name.rpartition("/")
    encoded = os.fsencode(file_name)
    most_bytes = _LONGEST_NAME - len(suffix)
    if len(encoded) <= most_bytes:
        return name
    number = "~" + hashlib.sha256(encoded).hexdigest()[:16]
    return folder + slash + encoded[: most_bytes - len(number)].decode(errors="ignore") + number


def untouched(name: str, flags: int) -> int:
    """An opener for files that others may have put there: follows no links, waits for no pipes, empties no files."""
    return os.open(name, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, and create its folder. OSError names the file.

    It is written beside `path` and renamed: a full disk or a kill leaves the old file or the complete new one, and a
    link at `path` is replaced, not what it leads to.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as file:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, explained(error, path.parent)[0], str(path)) from error


def partial_path(path: Path) -> Path:
    """Where the unfinished file of `path` is."""
    return path.with_name(f".{short_name(path.name, '..partial')}.partial")


@contextmanager
def partial_file(path: Path) -> Iterator[IO[bytes]]:
    """Context with a file beside `path`, which the caller writes and renames to it; an error removes it.

    Its name is always the same, so the next write takes over what a killed process left. Several processes may write
    the same file: they wait for each other, and the last one stays.
    """
    file = _opened_alone(partial_path(path)) or open(path.with_name(f".{uuid.uuid4().hex}.partial"), "xb")
    with file:
        try:
            yield file
        except BaseException:  # Ctrl-C as well
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _opened_alone(path: Path) -> IO[bytes] | None:
    """Open a file for writing once no other process writes it.

    None: it cannot be locked (on some network disks) or opened, or it is a link, a pipe or another user's.
    """
    while True:
        with ExitStack() as closes_file, suppress(OSError):
            file = closes_file.enter_context(open(path, "wb", opener=untouched))
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1 or state.st_uid != os.geteuid():
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                path.unlink()
                raise
            if path.exists() and os.path.samestat(state, os.lstat(path)):
                file.truncate()
                closes_file.pop_all()  # it stays open
                return file
            continue  # while this process waited, another one has renamed it: open a new one
        return None  # after an error


def explained(error: OSError, folder: Path) -> tuple[str, str]:
    """The system's words for an error of a file in a folder, and what to do about it."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        if error.errno == errno.ENOSPC and disk.f_files > 0 == disk.f_favail:  # the system says that it has no space
            return NO_INODES, "Remove files there: the disk is full of small ones (df -i), whatever space it has"
    return error.strerror or str(error), _CURES.get(error.errno or 0, CHECK_DISK)


def write_figure(path: Path, figure: Figure, dpi: int, few_colours: bool = False) -> None:
    """Write a figure as a PNG, like `write_file`. `few_colours`, for charts, saves two thirds of the bytes."""
    encoded = BytesIO()
    figure.savefig(encoded, dpi=dpi)
    if few_colours:
        rgb = Image.open(encoded).convert("RGB")
        encoded = BytesIO()
        indexed = rgb.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        indexed.save(encoded, "PNG", optimize=True)
    write_file(path, encoded.getvalue())


def png(pixels: np.ndarray, palette: np.ndarray | None = None) -> bytes:
    """A PNG of uint8 (H, W) or RGB (H, W, 3) pixels.

    `palette`: uint8 (256, 3) RGB, for a palette PNG with indices `pixels` (H, W).
    """
    image = Image.fromarray(pixels)
    encoded = BytesIO()
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

    def add(self, make: Callable[[], T], write: Callable[[T], None], byte_count: int) -> None:
        """Call `write(make())`, where `make` may run beside others. Waits while more than `_MOST_BYTES` are held.

        `byte_count`: how many bytes both hold in memory.
        """
        previous = self._waiting[-1][0] if self._waiting else None

        def run() -> None:
            content = make()
            if previous is not None:
                previous.result()  # its error is ours
            write(content)

        self._waiting.append((self._pool.submit(run), byte_count))
        while len(self._waiting) > _WRITERS or sum(size for _, size in self._waiting) > _MOST_BYTES:
            self._waiting.popleft()[0].result()

    def __enter__(self) -> "WrittenBehind":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._waiting and (kind is None or issubclass(kind, Exception)):
                self._waiting.popleft()[0].result()
        finally:
            self._pool.shutdown(cancel_futures=True)
