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

# Folders and files that network disks, macOS, Windows and Linux put beside images.
_OF_SYSTEMS = {"@eadir", "#recycle", "#snapshot", "$recycle.bin", "system volume information", "__macosx", "lost+found"}
_OF_SYSTEMS |= {"thumbs.db", "desktop.ini"}
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


def file_list_of(root: Path, paths: Sequence[Path | str]) -> FileList:
    """The `FileList` of `paths`, which begin with `root`. A file that cannot be read has size and time 0."""
    start = 0 if root == Path() else len(os.path.join(root, ""))  # os.path.relpath would take most of the time
    return _file_list(root, [(str(path)[start:], _size_and_time(path)) for path in paths])


def composed(name: str) -> str:
    """A name whose letters and accents are one character each (NFC); macOS writes two."""
    return unicodedata.normalize("NFC", name)


def readable(name: object, lines: bool = False) -> str:
    """A name as messages show it: control characters are escaped. `lines`: not ends of lines, nor tabs."""

    def escape(match: re.Match) -> str:
        if lines and match[0] in "\n\t":
            return match[0]
        return match[0].encode("unicode_escape").decode()

    return _CONTROL.sub(escape, str(name))


def printable(name: object) -> str:
    """A name as pages and pictures show it: what UTF-8 cannot encode is escaped, too."""
    return readable(name).encode(errors="backslashreplace").decode()


def why_unfit(path: Path) -> str | None:
    """Why a path is not read as a file; None if it may be, or if reading it will say why it cannot."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):
        return "is a folder, pipe or device; expected a regular file"
    if state.st_size > _MOST_BYTES:
        return f"has {state.st_size:,} bytes; expected at most {_MOST_BYTES:,} (4 GiB)"
    return None


def is_hidden(name: str) -> bool:
    """Whether a file or folder is ignored: its name starts with a dot, or it is a system's own folder."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted as if they were `composed`; hidden ones are left out."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name)]
    return tuple(sorted(names, key=composed))


def list_files(folder: Path, suffixes: Sequence[str], deep: bool = False) -> dict[str, Path]:
    """{name: path} of the files in `folder` with one of `suffixes`, which are not part of the names; sorted.

    Names are `composed`, so images and labels pair however their disk stores accents. `deep`: also files in its
    folders; their names are paths below `folder`. Hidden files and folders do not count, nor links to a folder above.
    ValueError if two files have the same name.
    """
    ends = tuple(map(str.lower, suffixes))
    paths: dict[str, Path] = {}
    for file_name, entry in files_in(folder, deep):
        end = next(filter(file_name.lower().endswith, ends), None)
        if end is None:
            continue
        path = Path(entry.path)
        first_path = paths.setdefault(file_name[: -len(end)], path)
        if first_path != path:
            # `ascii` shows how accents differ.
            first, second = (ascii(str(file.relative_to(folder))) for file in (first_path, path))
            problem = f"{folder} holds both {first} and {second}: expected one file per name"
            raise ValueError(f"{problem}. Remove one, or move labels to a folder of their own.")
    return dict(sorted(paths.items()))


def files_in(folder: Path, deep: bool = True, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, os.DirEntry]]:
    """Each file of a folder that is not hidden, also behind links, and its `composed` path below the folder.

    `above`: the folders above, where a circle of links ends.
    """
    if deep:
        real_path = os.path.realpath(folder)
        if real_path in above:
            return
        above |= {real_path}
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            is_folder = os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()  # a link may lead to itself
            if not is_folder:
                yield composed(entry.name), entry
            elif deep:
                inside = files_in(folder / entry.name, deep, above)
                yield from ((f"{composed(entry.name)}/{name}", file) for name, file in inside)


def list_classes(
    folder: Path, classes: Sequence[str], suffixes: tuple[str, ...]
) -> tuple[FileList, np.ndarray, list[str]]:
    """The files in `folder`/CLASS for each of `classes`, sorted by class and name, and their classes, int64 (n,).

    Files in folders inside CLASS count, too, as in torchvision's ImageFolder. Only names that end with one of
    `suffixes`, in lower or upper case, count; hidden files do not. Also returns the paths of the other files.
    ImageNet's 1.3 million files take about ten seconds on a local disk.
    """
    start = len(os.path.join(folder, ""))
    left_out = list[str]()
    states_by_class = list[list[tuple[str, tuple[int, int]]]]()
    for name in classes:
        states = []
        for _, entry in files_in(folder / name):
            if entry.name.lower().endswith(suffixes):
                states.append((entry.path[start:], _size_and_time(entry)))
            else:
                left_out.append(entry.path)
        states_by_class.append(sorted(states))
    files = _file_list(folder, [state for states in states_by_class for state in states])
    return files, np.repeat(np.arange(len(classes)), [len(states) for states in states_by_class]), left_out


def _file_list(root: Path, named_states: Sequence[tuple[str, tuple[int, int]]]) -> FileList:
    """`named_states`: path below `root`, (size, time) of each file."""
    names = np.array([os.fsencode(name) for name, _ in named_states], np.bytes_)
    states = np.array([state for _, state in named_states], np.int64).reshape(-1, 2)
    return FileList(root, names, sizes=states[:, 0].copy(), times=states[:, 1].copy())


def _size_and_time(file: Path | str | os.DirEntry) -> tuple[int, int]:
    try:
        state = os.stat(file)
    except OSError:  # e.g. a dangling link; reading it will say so
        return 0, 0
    return state.st_size, state.st_mtime_ns


def _hash(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
