"""Reads CIFAR-10 and CIFAR-100 in all their forms: python pickles, binary records, pictures in folders or a zip file.

Pickles are read without executing their content. Pictures are decoded once into one array, which is cached.
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from datasets.cache import cache_folder, read_arrays, write_arrays
from datasets.classification import ClassificationDataset
from datasets.file_list import FileList, class_folders, list_classes, listed
from datasets.layout import Layout, first_of
from datasets.reading import Stored, Unreadable, complete, decode_image, missing, read
from datasets.segmentation import restorable
from datasets.time_limit import limited

SHAPE = (3, 32, 32)  # of an image: channels (RGB), height, width
_BYTES = 3 * 32 * 32
_SUFFIXES = (".jpg", ".jpeg", ".png")
_VERSION = 1  # increment when decoded pixels change


class Batch(NamedTuple):
    """The content of one file: pixels uint8 (n, 3, 32, 32) RGB, labels int64 (n,), names (n,)."""

    pixels: np.ndarray
    labels: np.ndarray
    names: np.ndarray


class _Foreign(Exception):
    """A pickle asks for an object that CIFAR's files do not contain."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, containers and numpy arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _CONSTRUCTORS.get((module, name))
        if found is None:
            raise _Foreign(f"{module}.{name}")
        return found


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise _Foreign(f"the encoding {encoding!r}")
    return text.encode(encoding)


_ARRAY = object()  # stands for the class, which must not be called


def _reconstruct(kind: object, shape: tuple, code: object) -> np.ndarray:
    """An empty array; its content follows in the pickle. Any other shape would give uninitialised memory."""
    if kind is not _ARRAY or shape != (0,):
        raise _Foreign(f"an array {shape} without content")
    return np.empty(0)


_CONSTRUCTORS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # since numpy 2
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


def read_pickle(path: Path, label_key: str, classes: int) -> Batch:
    """Read a batch of the "python version". ValueError if the file is missing, damaged, or holds anything else."""
    with limited(path):
        content = _unpickled(path)
    if not isinstance(content, dict):
        raise Unreadable(f"{path}: holds a {type(content).__name__}; expected a dictionary with data and {label_key}.")
    # Files of Python 2 have strings as keys, some copies have bytes.
    entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    data, labels = entries.get("data"), entries.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _BYTES:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise Unreadable(f'{path}: "data" is {found}; expected uint8 (images, {_BYTES}).')
    if not isinstance(labels, list) or len(labels) != len(data) or not all(isinstance(label, int) for label in labels):
        raise Unreadable(f'{path}: "{label_key}" does not hold one integer for each of {len(data)} images.')
    names = entries.get("filenames")
    if not isinstance(names, list) or len(names) != len(data):
        names = [f"{path.name}/{number:05d}" for number in range(len(data))]
    _check_labels(path, np.array(labels), classes)
    texts = [name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names]
    return Batch(data.reshape(-1, *SHAPE), np.array(labels, np.int64), np.array(texts))


def read_records(path: Path, label_bytes: int, classes: int) -> Batch:
    """Read a file of the "binary version": records of `label_bytes` bytes, the last of which is the label, and pixels.

    ValueError if the file is missing, truncated, or holds other labels.
    """
    try:
        with limited(path):
            content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise missing(path, error) from None
    record = label_bytes + _BYTES
    if not len(content) or len(content) % record:
        raise Unreadable(
            f"{path}: has {len(content)} bytes, so it is empty or truncated; expected records of {record} bytes."
        )
    records = content.reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    _check_labels(path, labels, classes)
    names = np.array([f"{path.name}/{number:05d}" for number in range(len(records))])
    return Batch(records[:, label_bytes:].reshape(-1, *SHAPE), labels, names)


def _unpickled(path: Path) -> object:
    try:
        with open(path, "rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()  # as numpy arrays of Python 2 require
    except _Foreign as error:
        raise Unreadable(
            f"{path}: the pickle asks for {error}, which could execute code and does not belong to CIFAR; nothing was "
            "executed."
        ) from None
    except OSError as error:
        raise missing(path, error) from None
    except Exception as error:  # a damaged pickle raises whatever Python does for damaged bytes
        raise Unreadable(
            f"{path}: cannot be read as a pickle, so it is damaged or truncated ({type(error).__name__}: {error})."
        ) from None


def _check_labels(path: Path, labels: np.ndarray, classes: int) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise Unreadable(
            f"{path}: image {wrong[0]} has the label {labels[wrong[0]]}; expected 0 to {classes - 1}. {len(wrong)} of "
            f"{len(labels)} labels are out of range."
        )


def in_folders(root: Path, split: str, classes: tuple[str, ...], layout: Layout) -> ClassificationDataset:
    """The pictures in `root`/`split`/CLASS, from the cache folder, or decoded and kept there.

    ValueError if the folders are not the `classes`, or empty, or names a file that is damaged or of another size.
    """
    folder = root / split
    with limited():
        _check_folders(class_folders(folder), classes, folder, root, layout)
    files, labels = list_classes(folder, classes, _SUFFIXES)
    empty = [name for label, name in enumerate(classes) if label not in labels]
    if empty:
        raise layout.error(f"{layout.name}: no pictures in {folder} of {first_of(empty)}", root)
    names = np.array([files.name(number) for number in range(len(files))])
    pixels = _pixels(files, layout.name, split, len(files), _read_files(files))
    return ClassificationDataset(layout.name, split, classes, labels, files, pixels, names)


def in_zip(archive: Path, split: str, classes: tuple[str, ...], layout: Layout) -> ClassificationDataset:
    """As `in_folders`, for the pictures that the zip file calls …/`split`/CLASS/NAME."""
    with restorable(), limited(archive), _opened(archive) as content:
        members = sorted(name for name in content.namelist() if _is_picture(name, split))
    found = [PurePosixPath(name).parts[-2] for name in members]
    _check_folders(sorted({*found}), classes, archive, archive.parent, layout)
    labels = np.array([classes.index(name) for name in found], np.int64)
    order = np.argsort(labels, kind="stable")  # as in folders, whatever lies above them
    members = [members[number] for number in order]
    names = np.array(["/".join(PurePosixPath(name).parts[-2:]) for name in members])
    files = listed(archive.parent, [archive])
    pixels = _pixels(files, layout.name, split, len(members), _read_members(archive, members))
    return ClassificationDataset(layout.name, split, classes, labels[order], files, pixels, names)


def _pixels(files: FileList, name: str, split: str, count: int, stored: Iterator[Stored]) -> np.ndarray:
    """All pictures, uint8 (count, 3, 32, 32) RGB. `stored`: their files in order, read only if they are not cached."""
    file = cache_folder() / "decoded" / f"{files.fingerprint([_VERSION, f'{name} {split}'])}.npz"
    found = read_arrays(file, ["pixels"])
    if found is not None:
        return found[0]
    pixels = np.empty((count, *SHAPE), np.uint8)
    with restorable():
        for number, picture in enumerate(stored):
            planes = decode_image(picture).transpose(2, 0, 1)
            if planes.shape != SHAPE:
                raise Unreadable(f"{picture.path}: has {planes.shape[2]}x{planes.shape[1]} pixels; expected 32x32.")
            pixels[number] = planes
    with suppress(OSError):  # a cache folder that is read-only or full only costs the time of decoding again
        write_arrays(file, {"pixels": pixels}, compressed=False)
    return pixels


def _is_picture(name: str, split: str) -> bool:
    *folders, file = PurePosixPath(name).parts
    return len(folders) >= 2 and folders[-2] == split and file.lower().endswith(_SUFFIXES) and not file.startswith(".")


def _check_folders(found: Sequence[str], classes: Sequence[str], where: Path, root: Path, layout: Layout) -> None:
    differences = {
        "no": [name for name in classes if name not in found],
        "unknown": [name for name in found if name not in classes],
    }
    if any(differences.values()):
        listed = "; ".join(f"{problem} {first_of(names)}" for problem, names in differences.items() if names)
        raise layout.error(f"{layout.name}: wrong class folders in {where}: {listed}", root)


def _read_files(files: FileList) -> Iterator[Stored]:
    for number in range(len(files)):
        path = files.path(number)
        with limited(path):
            stored = read(path)
        yield stored


def _read_members(archive: Path, members: Sequence[str]) -> Iterator[Stored]:
    with _opened(archive) as content:
        for member in members:
            path = archive / member
            with limited(path):
                try:
                    data = content.read(member)
                except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
                    raise Unreadable(f"{path}: cannot be unpacked ({error}); expected an intact zip file.") from None
            yield complete(path, data)


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(os.fspath(archive))
    except (zipfile.BadZipFile, OSError) as error:
        raise Unreadable(f"{archive}: cannot be read as a zip file ({error}); expected an intact one.") from None
