"""Checks a whole split, run by hand: decodes every file, and counts the label pixels."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from datasets.classification import ClassificationDataset
from datasets.reading import decode_image
from datasets.segmentation import RESTORE, SegmentationDataset, restorable
from datasets.verify import Problem, check, every, image_problems
from datasets.workers import Progress

# Warnings of libjpeg that mean damaged pixels. Its other warnings are harmless.
_DAMAGE = re.compile("Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG file|Inconsistent progression sequence")


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    `problems`: unpaired files first, then in the order of the files. Over all readable labels, `pixels`, int64
    (classes,), counts the pixels of each class, `labels`, int64 (classes,), the labels that contain it, and `ignored`
    the pixels of no class.
    """

    problems: tuple[Problem, ...]
    pixels: np.ndarray
    labels: np.ndarray
    ignored: int


def inspect(dataset: SegmentationDataset, workers: int | None = None, progress: Progress = None) -> Inspection:
    """Check every image and label of a split as `verify` does, but decode all pixels and count the label pixels.

    Returns problems instead of raising them. The dataset need not be strict: images without labels and labels without
    images are problems too. PNG files have checksums, so any damage is found. JPEG files have none: damage is found
    only if the decoder meets an invalid code, or the data ends too early or too late. `workers`: see `in_order`.
    """
    classes = len(dataset.classes)
    problems = _unpaired(dataset)
    pixels, labels = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for found, counts in every(dataset, partial(_inspected, dataset), workers, progress):
        problems += found
        pixels += counts
        labels += counts > 0
    return Inspection(tuple(problems), pixels[:classes], labels[:classes], ignored=int(pixels[dataset.ignore_index]))


def inspect_images(
    dataset: ClassificationDataset, workers: int | None = None, progress: Progress = None
) -> tuple[Problem, ...]:
    """Decode every image of a split and return the problems; arguments as in `inspect`.

    Images in memory have been decoded without a problem.
    """
    if dataset.pixels is not None:
        return ()

    def problems(index: int) -> list[Problem]:
        path = dataset.path(index)
        try:
            return image_problems(_decoded_size, path)
        except Exception as error:
            return [_unexpected(path, error)]

    return tuple(problem for found in every(dataset, problems, workers, progress) for problem in found)


def _inspected(dataset: SegmentationDataset, index: int) -> tuple[list[Problem], np.ndarray]:
    """An image's problems, and the number of its pixels of each train id, int64 (256,)."""
    try:
        with _printed_by_decoders():  # hidden: a bad label also raises an error
            size_of = partial(_decoded_size, turned=dataset.turned)
            problems, label = check(dataset, index, size_of, dataset.read_label)
    except Exception as error:
        problems, label = [_unexpected(dataset.files[index], error)], None
    return problems, np.bincount(() if label is None else label.reshape(-1), minlength=256)


def _unexpected(what: object, error: Exception) -> Problem:
    """An unforeseen failure must not stop the check of the other files."""
    return Problem("unexpected error", f"{what}: {type(error).__name__}: {error}")


def _unpaired(dataset: SegmentationDataset) -> list[Problem]:
    """Images without a label (only in a split with labels) and labels without an image."""
    labelled = any(entry.label is not None for entry in dataset.files)
    without_label = [entry.image for entry in dataset.files if labelled and entry.label is None]
    without_image = [entry.label for entry in dataset.files if entry.image is None]
    return [
        Problem(f"{kind} without {other}", f"{path}: has no {other}; expected one. Add it, or take the {kind} out.")
        for kind, other, paths in (("image", "label", without_label), ("label", "image", without_image))
        for path in paths
    ]


@restorable()
def _decoded_size(path: Path, turned: bool = False) -> tuple[int, int]:
    """(width, height) of an image, after decoding all its pixels. ValueError also if the decoder reports damage."""
    with _printed_by_decoders() as lines:
        size = decode_image(path, turned=turned).shape[1::-1]
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
    with tempfile.TemporaryFile() as file:
        standard_error = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        file.seek(0)
        lines += file.read().decode(errors="replace").splitlines()
