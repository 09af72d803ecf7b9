"""A name for what a dataset's files contain, under which the project remembers what it has made from them."""

import hashlib
import json
import os

from datasets.segmentation import SegmentationDataset


def fingerprint(dataset: SegmentationDataset, version: int | list) -> str:
    """A hexadecimal name for the dataset's content; the same after the whole folder is moved.

    It is made from the paths below the folder, sizes and modification times of all files, from the class table, and
    from `version`, which stands for the code that looks at them.
    """
    # Strings, as all of this is done at every start, and Path objects take most of the time of many files.
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
