"""Checks of a whole split.

`verify` runs before a training and remembers success. `inspect` is run by hand: it decodes and counts all pixels.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.cache import cache_folder
from datasets.class_table import Palettes, UnknownIds
from datasets.classification import ClassificationDataset
from datasets.reading import decode_image, label_palette, read
from datasets.segmentation import RESTORE, SegmentationDataset, restorable
from datasets.workers import Progress, in_order

_CHECKS = 6  # increment when the checks change: all data is then checked again
_SHOWN = 5
# Warnings of libjpeg that mean damaged pixels. Its other warnings are harmless.
_DAMAGE = re.compile("Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG file|Inconsistent progression sequence")

Split = SegmentationDataset | ClassificationDataset


class Found(NamedTuple):
    """Problems of an image and its label, and the label's pixels of each raw value, int64 (256,).

    `palette`: a label's file, and {id: RGB} of the ids that it holds, if it has a palette.
    """

    problems: list["Problem"]
    pixels: np.ndarray
    palette: tuple[Path, dict[int, tuple[int, ...]]] | None = None


class Problem(NamedTuple):
    """`kind` groups similar problems: "unreadable image", "unknown ids", …. `message` names the file."""

    kind: str
    message: str


class _Sums(NamedTuple):
    """Over all labels: the pixels of each raw value (256), the labels that hold each train id, the first differing
    palette. In a classification: no pixels, and the images of each class.
    """

    pixels: list[int]
    labels: list[int]
    conflict: str | None = None


def verify(dataset: Split, workers: int | None = None, progress: Progress = None) -> list[str]:
    """Check every image and label of a training split. ValueError lists the first problems and counts all.

    Returns doubts about its labels, such as classes that no image shows.

    TimeoutError names the first image that takes longer than the `reading_limit` around this call.

    With labels of pixels, images and instance files must be complete, with a readable header and the size of the label;
    their pixels are not decoded. Labels are decoded, and every id must be in the class table. In a classification,
    images in files are decoded; images in memory have been. `workers`: see `in_order`. The cache folder remembers
    success until a path, size or modification time changes. If it cannot be written, the check runs every time.
    """
    if isinstance(dataset, ClassificationDataset):
        look, key = partial(_seen, dataset.image), dataset.files.fingerprint([_CHECKS, dataset.name])
    else:
        look, key = partial(_looked, dataset, dataset.image_size), dataset.fingerprint([_CHECKS, dataset.palette_fix])
    remembered = cache_folder() / "verified" / key
    with suppress(OSError, ValueError, TypeError):
        return _doubts(dataset, _Sums(**json.loads(remembered.read_text())), "training image")
    problems, sums = _all(dataset, look, workers, progress)
    if problems:
        listed = "\n".join(f"  {line}" for line in first_lines([problem.message for problem in problems]))
        raise ValueError(
            f"{dataset.name}, split {dataset.split!r}: {len(problems)} problem(s) in {len(dataset)} images:\n{listed}"
        )
    with suppress(OSError):  # a read-only cache folder only costs the time of the next check
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(json.dumps(sums._asdict()))
    return _doubts(dataset, sums, "training image")


def _all(
    dataset: Split, look: Callable[[int], Found], workers: int | None, progress: Progress
) -> tuple[list[Problem], _Sums]:
    if isinstance(dataset, ClassificationDataset):
        in_files = dataset.pixels is None
        found = every(dataset, look, workers, progress) if in_files else ()
        labels = np.bincount(dataset.labels, minlength=len(dataset.classes))
        return [problem for each in found for problem in each.problems], _Sums([], labels.tolist())
    problems, palettes = [], Palettes(dataset.table.label_palette)
    pixels, labels = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for each in every(dataset, look, workers, progress):
        problems += each.problems
        pixels += each.pixels
        labels += dataset.table.by_class(each.pixels) > 0
        if each.palette is not None:
            palettes.add(*each.palette)
    if palettes.conflict is not None and dataset.palette_fix is not None:
        problems.append(Problem("palettes differ", f"{palettes.conflict}. {dataset.palette_fix}"))
    return problems, _Sums(pixels.tolist(), labels.tolist(), palettes.conflict)


def _doubts(dataset: Split, sums: _Sums, images: str) -> list[str]:
    """What may be wrong with the labels of `images`, such as "training image", where every file is right."""
    if isinstance(dataset, ClassificationDataset):
        absent = [name for name, count in zip(dataset.classes, sums.labels, strict=True) if not count]
        return [f"no {images} shows {', '.join(absent)}: check the labels and the classes"] * bool(absent)
    conflict = [sums.conflict] if sums.conflict and dataset.palette_fix is None else []
    return dataset.table.doubts(np.array(sums.pixels), images) + conflict


def first_lines(messages: Sequence[str]) -> list[str]:
    """The first messages and the number of the others; an ending that the messages share comes once, last."""
    shown = messages[:_SHOWN]
    ending = os.path.commonprefix([message[::-1] for message in shown])[::-1].partition(". ")[2]
    ending *= len(shown) > 1
    lines = [message.removesuffix(ending).rstrip() for message in shown]
    more = [f"… and {len(messages) - _SHOWN} more"] * (len(messages) > _SHOWN)
    return lines + more + [ending] * bool(ending)


def _seen(read: Callable[[Any], object], image: Any) -> Found:
    """An image without label pixels: a problem if `read(image)` raises ValueError."""
    problems = []
    try:
        read(image)
    except ValueError as error:
        problems.append(Problem("unreadable image", str(error)))
    return Found(problems, np.zeros(256, np.int64))


def every(dataset: Split, look: Callable[[int], Any], workers: int | None, progress: Progress) -> Iterator[Any]:
    """`look(index)` for every image. TimeoutError names the image that, with its label, was not read in time."""
    done = 0
    try:
        for done, found in enumerate(in_order(look, range(len(dataset)), workers), start=1):
            yield found
            if progress is not None:
                progress(done, len(dataset))
    except TimeoutError as error:
        raise TimeoutError(f"{dataset.path(done)}: {error}") from error


def _looked(dataset: SegmentationDataset, size_of: Callable[[Path], tuple[int, int]], index: int) -> Found:
    """One image and its label files.

    `size_of` returns (width, height) of an image or instance file, or raises ValueError.
    """
    entry = dataset.files[index]
    problems: list[Problem] = []

    def attempted(what: str, read: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return read(argument)
        except ValueError as error:
            kind = "unknown ids" if isinstance(error, UnknownIds) else f"unreadable {what}"
            problems.append(Problem(kind, str(error)))
            return None

    def compare(file: Path | None, size: tuple[int, int] | None) -> None:
        if image_size is not None and size is not None and size != image_size:
            message = dataset.size_mismatch(entry._replace(label=file), image_size, size)
            problems.append(Problem("sizes differ", message))

    image_size = None if entry.image is None else attempted("image", size_of, entry.image)
    label = None if entry.label is None else attempted("label", dataset.raw_label, index)
    compare(entry.label, None if label is None else label.shape[::-1])
    pixels = np.bincount(() if label is None else label.reshape(-1), minlength=256)
    palette = None
    if entry.label is not None and label is not None and (dataset.palette_fix or dataset.table.label_palette):
        colours = label_palette(read(entry.label))
        held = np.flatnonzero(pixels).tolist()
        palette = entry.label, {number: colours[number] for number in held if number in colours}
    compare(entry.instances, None if entry.instances is None else attempted("instances", size_of, entry.instances))
    return Found(problems, pixels, palette)


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    `images`: their number. `problems`: unpaired files first, then in the order of the files. Over all readable labels,
    `pixels`, int64 (classes,), counts the pixels of each class, `labels`, int64 (classes,), the labels that contain it
    (in a classification, its images), and `ignored` the pixels of no class. `doubts`: what may be wrong with them.
    """

    images: int
    problems: tuple[Problem, ...]
    pixels: np.ndarray
    labels: np.ndarray
    ignored: int
    doubts: tuple[str, ...] = ()


def inspect(dataset: Split, workers: int | None = None, progress: Progress = None) -> Inspection:
    """Check every image and label of a split as `verify` does, but decode all pixels and count the label pixels.

    Returns problems instead of raising them. The dataset need not be strict: images without labels and labels without
    images are problems too. PNG files have checksums, so any damage is found. JPEG files have none: damage is found
    only if the decoder meets an invalid code, or the data ends too early or too late. `workers`: see `in_order`.
    """
    images, classes, ignore_index = len(dataset), len(dataset.classes), 255
    problems: list[Problem] = []
    if isinstance(dataset, SegmentationDataset):
        images, ignore_index = sum(entry.image is not None for entry in dataset.files), dataset.ignore_index
        problems = _unpaired(dataset)
    found, sums = _all(dataset, partial(_inspected, dataset), workers, progress)
    pixels = np.zeros(256, np.int64)
    if isinstance(dataset, SegmentationDataset):
        pixels = dataset.table.by_class(np.array(sums.pixels))
    doubts = _doubts(dataset, sums, f"image of {dataset.split}") if dataset.has_labels else []
    labels = np.array(sums.labels[:classes])
    ignored = int(pixels[ignore_index])
    return Inspection(images, (*problems, *found), pixels[:classes], labels, ignored, tuple(doubts))


def _inspected(dataset: Split, index: int) -> Found:
    """As `_looked` or `_seen`, with all pixels decoded."""
    size_of = partial(_decoded_size, turned=dataset.turned)
    try:
        if isinstance(dataset, ClassificationDataset):
            return _seen(size_of, dataset.path(index))
        with _printed_by_decoders():  # hidden: a bad label also raises an error
            return _looked(dataset, size_of, index)
    except Exception as error:  # it must not stop the check of the other files
        problem = Problem("unexpected error", f"{dataset.path(index)}: {type(error).__name__}: {error}")
        return Found([problem], np.zeros(256, np.int64))


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
