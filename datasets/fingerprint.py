"""The key under which results computed from a dataset's files are cached."""

import hashlib
import json
import os

from datasets.segmentation import SegmentationDataset


def fingerprint(dataset: SegmentationDataset, version: int | list) -> str:
    """Hexadecimal hash of a dataset's files; it does not change if the whole folder is moved.

    It covers the paths below the folder, sizes and modification times of all files, the class table's label ids, and
    `version`, which identifies the code that reads them.
    """
    # Strings, because this runs at every start: with many files, Path objects would take most of the time.
    every = (path for entry in dataset.files for path in (entry.image, entry.label, entry.instances))
    paths = [str(path) for path in every if path is not None]
    top = os.path.commonpath({os.path.dirname(path) for path in paths}) if paths else ""
    known_ids = sorted(dataset.table.label_ids.items())
    digest = hashlib.sha256(json.dumps([version, dataset.name, dataset.split, known_ids]).encode())
    for path in paths:
        digest.update(f"{path[len(top) :]}|{_state(path)}\n".encode())
    return digest.hexdigest()


def _state(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return "missing"
    return f"{stat.st_size}|{stat.st_mtime_ns}"
