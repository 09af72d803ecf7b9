"""Checks a whole split before a training. Success is remembered."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.cache import cache_folder
from datasets.class_table import UnknownIds
from datasets.classification import ClassificationDataset
from datasets.segmentation import SegmentationDataset
from datasets.workers import Progress, in_order

_CHECKS = 4  # increment when the checks change: all data is then checked again
_SHOWN = 5

_Split = SegmentationDataset | ClassificationDataset


class Problem(NamedTuple):
    """`kind` groups similar problems: "unreadable image", "unknown ids", …. `message` names the file."""

    kind: str
    message: str


def verify(dataset: SegmentationDataset, workers: int | None = None, progress: Progress = None) -> list[str]:
    """Check every image and label of a split. ValueError lists the first problems and counts all.

    Returns the classes without a pixel, unless a benchmark has chosen the classes.

    TimeoutError names the first image that takes longer than the `reading_limit` around this call.

    Images and instance files must be complete, with a readable header and the size of the label; their pixels are not
    decoded. Labels are decoded, and every id must be in the class table. `workers`: see `in_order`. The cache folder
    remembers success until a path, size or modification time changes. If it cannot be written, the check runs every
    time.
    """

    def look(index: int) -> tuple[list[Problem], set[int]]:
        problems, label = check(dataset, index, dataset.image_size, dataset.read_label)
        return problems, set() if label is None else {*np.flatnonzero(np.bincount(label.reshape(-1))).tolist()}

    seen = _check_once(dataset, look, dataset.fingerprint(_CHECKS), workers, progress)
    return [name for number, name in enumerate(dataset.classes) if number not in seen and not dataset.table.benchmark]


def verify_images(dataset: ClassificationDataset, workers: int | None = None, progress: Progress = None) -> list[str]:
    """Decode every image of a split. ValueError lists the first problems and counts all. Returns [], unlike `verify`.

    The problems are the ones that would stop a training: files that are missing, truncated or no image. Images in
    memory have been checked. Arguments, memory of success and TimeoutError are as in `verify`.
    """
    if dataset.pixels is None:

        def look(number: int) -> tuple[list[Problem], set[int]]:
            return image_problems(dataset.image, number), set()

        _check_once(dataset, look, dataset.files.fingerprint([_CHECKS, dataset.name]), workers, progress)
    return []


def _check_once(
    dataset: _Split,
    look: Callable[[int], tuple[list[Problem], set[int]]],
    key: str,
    workers: int | None,
    progress: Progress,
) -> set[int]:
    """Check all images; return the union of their classes. ValueError lists problems.

    `look(index)` returns an image's problems and classes. Success is remembered as `key`: nothing is checked again.
    """
    remembered = cache_folder() / "verified" / key
    with suppress(OSError, ValueError):
        return {*json.loads(remembered.read_text())}
    problems, seen = [], set[int]()
    for found, held in every(dataset, look, workers, progress):
        problems += found
        seen |= held
    if problems:
        listed = "\n".join(f"  {line}" for line in first_lines([problem.message for problem in problems]))
        raise ValueError(
            f"{dataset.name}, split {dataset.split!r}: {len(problems)} problem(s) in {len(dataset)} images:\n{listed}"
        )
    with suppress(OSError):  # a read-only cache folder only costs the time of the next check
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(json.dumps(sorted(seen)))
    return seen


def first_lines(messages: Sequence[str]) -> list[str]:
    """The first messages and the number of the others; an ending that the messages share comes once, last."""
    shown = messages[:_SHOWN]
    ending = os.path.commonprefix([message[::-1] for message in shown])[::-1].partition(". ")[2]
    ending *= len(shown) > 1
    lines = [message.removesuffix(ending).rstrip() for message in shown]
    more = [f"… and {len(messages) - _SHOWN} more"] * (len(messages) > _SHOWN)
    return lines + more + [ending] * bool(ending)


def image_problems(read: Callable[[Any], object], image: Any) -> list[Problem]:
    """A problem if `read(image)` raises ValueError."""
    try:
        read(image)
    except ValueError as error:
        return [Problem("unreadable image", str(error))]
    return []


def every(dataset: _Split, look: Callable[[int], Any], workers: int | None, progress: Progress) -> Iterator[Any]:
    """`look(index)` for every image. TimeoutError names the image that, with its label, was not read in time."""
    done = 0
    try:
        for done, found in enumerate(in_order(look, range(len(dataset)), workers), start=1):
            yield found
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
    label = None if entry.label is None else attempted("label", read_label, index)
    compare(entry.label, None if label is None else label.shape[::-1])
    compare(entry.instances, None if entry.instances is None else attempted("instances", size_of, entry.instances))
    return problems, label
