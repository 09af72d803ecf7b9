"""The key under which results computed from a dataset's files are cached."""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from datasets.time_limit import limited

if TYPE_CHECKING:
    from datasets.segmentation import SegmentationDataset


@limited()
def names_and_sizes(dataset: "SegmentationDataset") -> tuple[str, str]:
    """Hexadecimal hashes of the files' names below the dataset's folder, and of their sizes."""
    names, sizes = hashlib.sha256(), hashlib.sha256()
    for path, name in _files(dataset):
        names.update(f"{name}\n".encode(errors="surrogateescape"))
        sizes.update(_state(path).partition("|")[0].encode() + b"\n")
    return names.hexdigest(), sizes.hexdigest()


@limited()
def fingerprint(dataset: "SegmentationDataset", version: int | list) -> str:
    """Hexadecimal hash of a dataset's files; it does not change if the whole folder is moved.

    It covers the paths below the folder, sizes and modification times of all files, the class table's label ids, and
    `version`, which identifies the code that reads them.
    """
    known_ids = sorted(dataset.table.label_ids.items())
    digest = hashlib.sha256(json.dumps([version, dataset.name, dataset.split, known_ids]).encode())
    for path, name in _files(dataset):
        digest.update(f"{name}|{_state(path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(dataset: "SegmentationDataset") -> Iterator[tuple[str, str]]:
    """Every file's path, and its name below the dataset's folder."""
    # Strings, because this runs at every start: with many files, Path objects would take most of the time.
    every = (path for entry in dataset.files for path in (entry.image, entry.label, entry.instances))
    paths = [str(path) for path in every if path is not None]
    top = os.path.commonpath({os.path.dirname(path) for path in paths}) if paths else ""
    return ((path, path[len(top) :]) for path in paths)


def _state(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return "missing"
    return f"{stat.st_size}|{stat.st_mtime_ns}"
