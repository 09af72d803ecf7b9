"""One pass over a data set before the first training step, so that a bad file does not stop the run hours later."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from datasets.cache import cache_folder
from datasets.fingerprint import fingerprint
from datasets.reading import read_size
from datasets.segmentation import SegmentationDataset, size_mismatch

_CHECKS = 1  # raise it with every change of the checks: what was remembered is then checked again
_SHOWN = 5


def verify(
    dataset: SegmentationDataset, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> None:
    """Checks every image and label of a split; ValueError lists the first offenders and counts all.

    Images: readable header, complete file, the label's size; their pixels are not decoded. Labels: decoded, every id
    in the class table. `workers` threads (default: one per core, at most 8); `progress(done, total)` is called from
    the calling thread after each image. Success is remembered in the cache folder under the paths, sizes and
    modification times of all files; where that folder cannot be written the check just runs every time.
    """
    remembered = cache_folder() / "verified" / fingerprint(dataset, version=_CHECKS)
    if remembered.is_file():
        return
    problems = []
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        for done, found in enumerate(pool.map(lambda index: _check(dataset, index), range(len(dataset))), start=1):
            problems += found
            if progress is not None:
                progress(done, len(dataset))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{dataset.name}, split {dataset.split!r}: {len(problems)} problem(s) in {len(dataset)} images:\n"
            f"{listed}{more}"
        )
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.touch()
    except OSError:
        pass  # a read-only home: nothing is lost but the time of the next check


def _check(dataset: SegmentationDataset, index: int) -> list[str]:
    """What is wrong with one image and its label, as messages."""
    problems, image_size, label_size = [], None, None
    try:
        image_size = read_size(dataset.files[index].image)
    except ValueError as error:
        problems.append(str(error))
    if dataset.files[index].label is not None:
        try:
            label_size = dataset.read_label(index).shape[::-1]
        except ValueError as error:
            problems.append(str(error))
    if image_size is not None and label_size is not None and image_size != label_size:
        problems.append(size_mismatch(dataset.files[index], image_size=image_size, label_size=label_size))
    return problems
