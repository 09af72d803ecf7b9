"""Checks a whole split: `verify` runs before every training, `inspect` decodes every file and is run by hand."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from torch.utils.data import Dataset

from datasets.cache import cache_folder
from datasets.class_table import UnknownIds
from datasets.fingerprint import fingerprint
from datasets.reading import decode_image, read_size
from datasets.segmentation import RESTORE, SegmentationDataset, restorable, size_mismatch
from datasets.workers import in_order

_CHECKS = 3  # increment when the checks change: all data is then checked again
_SHOWN = 5
# Warnings of libjpeg that mean damaged pixels. Its other warnings are harmless.
_DAMAGE = re.compile("Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG file|Inconsistent progression sequence")


class Problem(NamedTuple):
    """`kind` groups similar problems: "unreadable image", "unknown ids", …. `message` names the file."""

    kind: str
    message: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    `problems`: unpaired files first, then in the order of the files. The counts cover all readable labels: `pixels`,
    int64 (classes,), pixels of each class; `images`, int64 (classes,), images that contain the class; `ignored`, pixels
    of no class.
    """

    problems: tuple[Problem, ...]
    pixels: np.ndarray
    images: np.ndarray
    ignored: int


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
    remembered = cache_folder() / "verified" / fingerprint(dataset, version=_CHECKS)
    if remembered.is_file():
        return
    problems = []
    for found in _every(_Checked(dataset), workers, progress):
        problems += found
    if problems:
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


def inspect(
    dataset: SegmentationDataset, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Inspection:
    """Check every image and label of a split as `verify` does, but decode all pixels and count the label pixels.

    Returns problems instead of raising them. The dataset need not be strict: images without labels and labels without
    images are problems too. PNG files have checksums, so any damage is found. JPEG files have none: damage is found
    only if the decoder meets an invalid code, or the data ends too early or too late.

    `workers`: number of processes (default: one per core; 0: read in this process). `progress(done, total)` is called
    after each image.
    """
    classes = len(dataset.classes)
    problems = _unpaired(dataset)
    pixels, images = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for found, counts in _every(_Inspected(dataset), workers, progress):
        problems += found
        pixels += counts
        images += counts > 0
    return Inspection(tuple(problems), pixels[:classes], images[:classes], ignored=int(pixels[dataset.ignore_index]))


class _Checked(Dataset):
    """image -> its problems; image pixels are not decoded."""

    def __init__(self, dataset: SegmentationDataset):
        self.dataset = dataset

    def __getitem__(self, index: int) -> list[Problem]:
        problems, _ = _check(self.dataset, index, restorable()(read_size), self.dataset.read_label)
        return problems


class _Inspected(Dataset):
    """image -> its problems and the number of pixels of each train id, int64 (256,)."""

    def __init__(self, dataset: SegmentationDataset):
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[list[Problem], np.ndarray]:
        try:
            with _printed_by_decoders():  # hidden: a bad label also raises an error
                problems, label = _check(self.dataset, index, _decoded_size, self.dataset.read_label)
        except Exception as error:  # an unforeseen failure must not stop the check of the other files
            problem = Problem("unexpected error", f"{self.dataset.files[index]}: {type(error).__name__}: {error}")
            problems, label = [problem], None
        return problems, np.zeros(256, np.int64) if label is None else _histogram(label)


def _every(
    source: _Checked | _Inspected, workers: int | None, progress: Callable[[int, int], None] | None
) -> Iterator[Any]:
    """The items of `source`. TimeoutError names the image that, with its label, was not read in time."""
    files, done = source.dataset.files, 0
    try:
        for item in in_order(source, range(len(files)), workers):
            yield item
            done += 1
            if progress is not None:
                progress(done, len(files))
    except TimeoutError as error:
        raise TimeoutError(f"{files[done].image or files[done].label}: {error}") from error


def _check(
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


def _unpaired(dataset: SegmentationDataset) -> list[Problem]:
    """Images without a label (only in a split with labels) and labels without an image."""
    labelled = any(entry.label is not None for entry in dataset.files)
    without_label = [entry.image for entry in dataset.files if labelled and entry.label is None]
    without_image = [entry.label for entry in dataset.files if entry.image is None]
    return [
        *(Problem("image without label", f"{path}: has no label; expected one. {RESTORE}") for path in without_label),
        *(Problem("label without image", f"{path}: has no image; expected one. {RESTORE}") for path in without_image),
    ]


@restorable()
def _decoded_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image, after decoding all its pixels. ValueError also if the decoder reports damage."""
    with _printed_by_decoders() as lines:
        size = decode_image(path).shape[1::-1]
    complaint = next(filter(_DAMAGE.search, lines), None)
    if complaint is not None:
        raise ValueError(f"{path}: damaged pixels, the decoder says {complaint!r}. {RESTORE}")
    return size


@contextmanager
def _printed_by_decoders() -> Iterator[list[str]]:
    """Capture what this process prints to standard error: libjpeg reports damage nowhere else.

    The list is filled when the context ends. Use it only in single-threaded processes.
    """
    lines: list[str] = []
    standard_error = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield lines
            finally:
                os.dup2(standard_error, 2)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
    finally:
        os.close(standard_error)


def _histogram(label: np.ndarray) -> np.ndarray:
    """uint8 (H, W) -> pixels of each value, int64 (256,). OpenCV counts in float32: exact to 2^24 pixels per call."""
    bands = np.array_split(label, 1 + label.size // 2**23)
    counts = np.zeros(256, np.int64)
    for band in bands:
        counts += cv2.calcHist([band], [0], None, [256], [0, 256]).ravel().astype(np.int64)
    return counts
