"""Checks a whole split before a training. Success is remembered."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Dataset

from datasets.cache import cache_folder
from datasets.class_table import UnknownIds
from datasets.classification import ClassificationDataset
from datasets.reading import read_size
from datasets.segmentation import SegmentationDataset, restorable, size_mismatch
from datasets.workers import in_order

_CHECKS = 3  # increment when the checks change: all data is then checked again
_SHOWN = 5

_Split = TypeVar("_Split", bound=SegmentationDataset | ClassificationDataset)


class Problem(NamedTuple):
    """`kind` groups similar problems: "unreadable image", "unknown ids", …. `message` names the file."""

    kind: str
    message: str


def verify(
    dataset: SegmentationDataset, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> None:
    """Check every image and label of a split. ValueError lists the first problems and counts all.

    TimeoutError names the first image that takes longer than the `reading_limit` around this call.

    Images and instance files must be complete, with a readable header and the size of the label; their pixels are not
    decoded. Labels are decoded, and every id must be in the class table. `workers`: number of processes (default: one
    per core; 0: read in this process). `progress(done, total)` is called after each image. The cache folder remembers
    success until a path, size or modification time changes. If it cannot be written, the check runs every time.
    """
    _check_once(_Checked(dataset), dataset.fingerprint(_CHECKS), workers, progress)


def verify_images(
    dataset: ClassificationDataset, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> None:
    """Decode every image of a split. ValueError lists the first problems and counts all.

    The problems are the ones that would stop a training: files that are missing, truncated or no image. Images in
    memory have been checked. Arguments, memory of success and TimeoutError are as in `verify`.
    """
    if dataset.pixels is None:
        _check_once(_Decoded(dataset), dataset.files.fingerprint([_CHECKS, dataset.name]), workers, progress)


def _check_once(source: "Source", key: str, workers: int | None, progress: Callable[[int, int], None] | None) -> None:
    """ValueError for the problems that `source` finds. Success is remembered as `key`, and nothing is checked again."""
    remembered = cache_folder() / "verified" / key
    if remembered.is_file():
        return
    problems = []
    for found in every(source, workers, progress):
        problems += found
    if problems:
        dataset = source.dataset
        listed = "\n".join(f"  {problem.message}" for problem in problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{dataset.name}, split {dataset.split!r}: {len(problems)} problem(s) in {len(dataset)} images:\n"
            f"{listed}{more}"
        )
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.touch()
    except OSError:
        pass  # a read-only cache folder only costs the time of the next check


class Source(Dataset, Generic[_Split]):
    """index -> what a check finds in an image of `dataset`."""

    def __init__(self, dataset: _Split):
        self.dataset = dataset


class _Checked(Source[SegmentationDataset]):
    """image -> its problems; image pixels are not decoded."""

    def __getitem__(self, index: int) -> list[Problem]:
        problems, _ = check(self.dataset, index, restorable()(read_size), self.dataset.read_label)
        return problems


class _Decoded(Source[ClassificationDataset]):
    """image -> its problems, after decoding it."""

    def __getitem__(self, index: int) -> list[Problem]:
        try:
            self.dataset.image(index)
        except ValueError as error:
            return [Problem("unreadable image", str(error))]
        return []


def every(source: Source, workers: int | None, progress: Callable[[int, int], None] | None) -> Iterator[Any]:
    """The items of `source`. TimeoutError names the image that, with its label, was not read in time."""
    dataset, done = source.dataset, 0
    try:
        for item in in_order(source, range(len(dataset)), workers):
            yield item
            done += 1
            if progress is not None:
                progress(done, len(dataset))
    except TimeoutError as error:
        raise TimeoutError(f"{dataset.path(done)}: {error}") from error


def check(
    dataset: SegmentationDataset,
    index: int,
    size_of: Callable[[Path], tuple[int, int]],
    read_label: Callable[[int], np.ndarray],
) -> tuple[list[Problem], np.ndarray | None]:
    """Problems of one image and its label files, and the label: train ids, uint8 (H, W), or None if unreadable.

    `size_of` returns (width, height) of the image or instance file. It and `read_label` raise ValueError for bad files.
    """
    entry = dataset.files[index]
    problems, image_size, label = [], None, None
    if entry.image is not None:
        try:
            image_size = size_of(entry.image)
        except ValueError as error:
            problems.append(Problem("unreadable image", str(error)))
    if entry.label is not None:
        try:
            label = read_label(index)
        except UnknownIds as error:
            problems.append(Problem("unknown ids", str(error)))
        except ValueError as error:
            problems.append(Problem("unreadable label", str(error)))
    if image_size is not None and label is not None and image_size != label.shape[::-1]:
        message = size_mismatch(entry, image_size=image_size, label_size=label.shape[::-1])
        problems.append(Problem("sizes differ", message))
    if entry.instances is not None:
        try:
            instances_size = size_of(entry.instances)
            if image_size not in (None, instances_size):
                message = size_mismatch(entry._replace(label=entry.instances), image_size, instances_size)
                problems.append(Problem("sizes differ", message))
        except ValueError as error:
            problems.append(Problem("unreadable instances", str(error)))
    return problems, label
