"""The files of a dataset: names, sizes and times, kept compactly, and the listing of folders."""

import hashlib
import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Folders that network disks, macOS, Windows and Linux put beside images.
_OF_SYSTEMS = {"@eadir", "#recycle", "#snapshot", "$recycle.bin", "system volume information", "__macosx", "lost+found"}
# What moves a terminal's cursor, begins a line or turns text around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_MOST_BYTES = 2**32  # of a file


@dataclass(frozen=True)
class FileList:
    """Files below `root` in a fixed order, as they were when they were listed.

    `names`: paths below `root`, encoded by `os.fsencode`, numpy's S type (n,). `sizes`: bytes, int64 (n,). `times`: of
    the last modification, in ns since 1970, int64 (n,). They are arrays because a million Python strings would take
    more memory, and every worker would soon have its own copy.
    """

    root: Path
    names: np.ndarray
    sizes: np.ndarray
    times: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def name(self, number: int) -> str:
        return os.fsdecode(self.names[number])

    def path(self, number: int) -> Path:
        return self.root / self.name(number)

    def names_and_sizes(self) -> tuple[str, str]:
        """Hexadecimal hashes of the names, and of the sizes."""
        return hashlib.sha256(b"\n".join(self.names.tolist())).hexdigest(), _hash(self.sizes)

    def fingerprint(self, version: list) -> str:
        """Hexadecimal hash of names, sizes, times and `version`; it does not change if the whole folder is moved."""
        parts = [version, *self.names_and_sizes(), _hash(self.times)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def listed(root: Path, paths: Sequence[Path | str]) -> FileList:
    """The list of `paths`, which begin with `root`. A file that cannot be read has size and time 0."""
    start = 0 if root == Path() else len(os.path.join(root, ""))  # os.path.relpath would take most of the time
    return _file_list(root, [(str(path)[start:], _size_and_time(path)) for path in paths])


def composed(name: str) -> str:
    """A name whose letters and accents are one character each (NFC); macOS writes two."""
    return unicodedata.normalize("NFC", name)


def readable(name: object, lines: bool = False) -> str:
    """A name as messages show it: control characters are escaped. `lines`: not ends of lines, nor tabs."""

    def escaped(found: re.Match) -> str:
        return found[0] if lines and found[0] in "\n\t" else found[0].encode("unicode_escape").decode()

    return _CONTROL.sub(escaped, str(name))


def printable(name: object) -> str:
    """A name as pages and pictures show it: what UTF-8 cannot encode is escaped, too."""
    return readable(name).encode(errors="backslashreplace").decode()


def unfit(path: Path) -> str | None:
    """Why a path is not read as a file; None if it can be, or if reading it will say why it cannot."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):
        return "is a folder, pipe or device; expected a regular file"
    large = f"has {state.st_size:,} bytes; expected at most {_MOST_BYTES:,} (4 GiB)"
    return large if state.st_size > _MOST_BYTES else None


def is_hidden(name: str) -> bool:
    """Whether a file or folder is ignored: its name starts with a dot, or it is a system's own folder."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted as if they were `composed`; hidden ones are left out."""
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name)]
    return tuple(sorted(found, key=composed))


def list_files(folder: Path, suffixes: Sequence[str], deep: bool = False) -> dict[str, Path]:
    """{name: path} of the files in `folder` with one of `suffixes`, which are not part of the names; sorted.

    Names are `composed`, so images and labels pair however their disk stores accents. `deep`: also files in its
    folders; their names are paths below `folder`. Hidden files and folders do not count, nor links to a folder above.
    ValueError if two files have the same name, or a folder has one of the suffixes.
    """
    found: dict[str, Path] = {}
    for name, entry in _entries(folder, suffixes, deep):
        path = Path(entry.path)
        if (other := found.setdefault(name, path)) != path:
            one, two = (ascii(str(file.relative_to(folder))) for file in (other, path))  # it shows how accents differ
            raise ValueError(f"{folder} holds both {one} and {two}: expected one file per name. Remove one.")
    return dict(sorted(found.items()))


def _entries(
    folder: Path, suffixes: Sequence[str], deep: bool = False, above: frozenset[str] = frozenset()
) -> Iterator[tuple[str, os.DirEntry]]:
    """Each file of `list_files`, and its name there."""
    if deep and (real := os.path.realpath(folder)) not in above:
        above |= {real}
    elif deep:  # a circle of links
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            suffix = next((suffix for suffix in suffixes if entry.name.lower().endswith(suffix.lower())), None)
            if is_hidden(entry.name):
                continue
            if suffix is not None and entry.is_dir():
                raise ValueError(f"{readable(folder / entry.name)} is a folder with an image's name: rename it")
            if deep and entry.is_dir():
                inside = _entries(folder / entry.name, suffixes, deep, above)
                yield from ((f"{composed(entry.name)}/{name}", file) for name, file in inside)
            elif suffix is not None:
                yield composed(entry.name[: -len(suffix)]), entry


def list_classes(folder: Path, classes: Sequence[str], suffixes: tuple[str, ...]) -> tuple[FileList, np.ndarray]:
    """The files in `folder`/CLASS for each of `classes`, sorted by class and name, and their classes, int64 (n,).

    Files in folders inside CLASS count, too, as in torchvision's ImageFolder. Only names that end with one of
    `suffixes`, in lower or upper case, count; hidden files do not. ImageNet's 1.3 million files take about ten seconds
    on a local disk.
    """
    start = len(os.path.join(folder, ""))
    found = [
        sorted((entry.path[start:], _size_and_time(entry)) for _, entry in _entries(folder / name, suffixes, deep=True))
        for name in classes
    ]
    files = _file_list(folder, [entry for entries in found for entry in entries])
    return files, np.repeat(np.arange(len(classes)), [len(entries) for entries in found])


def _file_list(root: Path, found: Sequence[tuple[str, tuple[int, int]]]) -> FileList:
    """`found`: path below `root`, (size, time) of each file."""
    names = np.array([os.fsencode(name) for name, _ in found], np.bytes_)
    states = np.array([state for _, state in found], np.int64).reshape(-1, 2)
    return FileList(root, names, sizes=states[:, 0].copy(), times=states[:, 1].copy())


def _size_and_time(file: Path | str | os.DirEntry) -> tuple[int, int]:
    try:
        stat = os.stat(file)
    except OSError:  # e.g. a dangling link; reading it will say so
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _hash(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
