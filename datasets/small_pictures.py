"""Small pictures of one size in class folders or in a zip file, decoded once into one array, which is cached."""

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from datasets.cache import cache_folder, read_arrays, write_arrays
from datasets.classification import ClassificationDataset
from datasets.file_list import FileList, class_folders, list_classes, listed
from datasets.layout import Layout, first_of
from datasets.reading import Stored, Unreadable, complete, decode_image, read
from datasets.segmentation import restorable
from datasets.time_limit import limited

SIZE = (32, 32)  # height, width
_SUFFIXES = (".jpg", ".jpeg", ".png")
_VERSION = 1  # increment when decoded pixels change


def in_folders(root: Path, split: str, classes: tuple[str, ...], layout: Layout) -> ClassificationDataset:
    """The pictures in `root`/`split`/CLASS, from the cache folder, or decoded and kept there.

    ValueError if the folders are not the `classes`, or empty, or names a file that is damaged or of another size.
    """
    folder = root / split
    with limited():
        _check_classes(class_folders(folder), classes, folder, root, layout)
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
    _check_classes(sorted({*found}), classes, archive, archive.parent, layout)
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
    pixels = np.empty((count, 3, *SIZE), np.uint8)
    with restorable():
        for number, picture in enumerate(stored):
            image = decode_image(picture)
            if image.shape[:2] != SIZE:
                raise Unreadable(
                    f"{picture.path}: has {image.shape[1]}x{image.shape[0]} pixels; expected {SIZE[1]}x{SIZE[0]}."
                )
            pixels[number] = image.transpose(2, 0, 1)
    with suppress(OSError):  # a cache folder that is read-only or full only costs the time of decoding again
        write_arrays(file, {"pixels": pixels}, compressed=False)
    return pixels


def _is_picture(name: str, split: str) -> bool:
    *folders, file = PurePosixPath(name).parts
    return len(folders) >= 2 and folders[-2] == split and file.lower().endswith(_SUFFIXES) and not file.startswith(".")


def _check_classes(found: Sequence[str], classes: Sequence[str], where: Path, root: Path, layout: Layout) -> None:
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
