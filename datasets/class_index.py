"""Index of classes: for every image and class, the pixel count and a random sample of pixel positions.

Class-uniform sampling draws from it. Building it takes one pass over the labels; it is then cached.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import cv2
import numpy as np

from datasets.cache import read_arrays, require_cache_folder, write_arrays
from datasets.segmentation import SegmentationDataset
from datasets.verify import map_images
from datasets.workers import Progress

POSITIONS = 32  # kept per image and class
_VERSION = 1  # increment when counts or samples change
_SEED = 0
_BAND = 8192  # pixels counted and searched at a time
_ARRAYS = ("counts", "places")  # in a file


@dataclass(frozen=True)
class ClassIndex:
    """Pixel counts and sampled pixel positions of every class in every image.

    `classes`: names. `counts`: pixels, int64 (images, classes). `places`: (row, column), uint16 (all positions, 2),
    sorted by image, then by class; uint32 if a side is longer than 65,536 pixels. Each class of an image has
    min(pixels, `positions`) entries. `folder`: where it is saved.
    """

    classes: tuple[str, ...]
    counts: np.ndarray
    places: np.ndarray
    positions: int = POSITIONS
    folder: Path | None = None

    @cached_property
    def _ends(self) -> np.ndarray:
        """(images, classes): where their places end."""
        return np.minimum(self.counts, self.positions).cumsum().reshape(self.counts.shape)

    def __len__(self) -> int:
        return len(self.counts)

    def absent_classes(self) -> list[str]:
        """Names of the classes without a pixel in any image."""
        return [self.classes[class_id] for class_id in np.flatnonzero(self.counts.sum(axis=0) == 0)]

    def images_with(self, class_id: int) -> np.ndarray:
        """Indices of the images that contain a class, ascending."""
        return np.flatnonzero(self.counts[:, class_id])

    def pixels(self, image: int, class_id: int) -> np.ndarray:
        """Up to `positions` random pixels of a class in an image: (row, column), uint16 or uint32 (n, 2)."""
        end = self._ends[image, class_id]
        return self.places[end - min(self.counts[image, class_id], self.positions) : end]


def index_classes(
    dataset: SegmentationDataset,
    folder: str | os.PathLike | None = None,
    workers: int | None = None,
    progress: Progress = None,
    folder_key: str = "folder",
) -> ClassIndex:
    """Load the index of a split from `folder` (default: the cache folder), or build and save it there.

    The file is named after the dataset's fingerprint. `workers`: see `map_in_order`.

    Raises:
        ValueError: a label is bad or missing, or there is no folder, or it cannot be written (the message names
            `folder_key`).
        TimeoutError: names the image whose label took longer than `reading_errors` around this call allows.
    """
    key = dataset.fingerprint([_VERSION, POSITIONS, _SEED, len(dataset.classes)])
    parent = folder or require_cache_folder("the class index", f"give {folder_key}=DIR") / "class-index"
    index_folder = Path(os.path.expanduser(parent)) / key
    file = index_folder / "index.npz"
    arrays = read_arrays(file, _ARRAYS)
    if arrays is None:
        try:
            index_folder.mkdir(parents=True, exist_ok=True)  # before the labels are read
            arrays = _index_labels(dataset, workers, progress)
            write_arrays(file, dict(zip(_ARRAYS, arrays, strict=True)))
        except TimeoutError:  # of a label; it is an OSError, but not one of the folder
            raise
        except OSError as error:
            raise ValueError(
                f"the class index of {dataset.name}, split {dataset.split!r}, cannot be written to {index_folder} "
                f"({error}); expected a writable folder; give {folder_key}=DIR to choose one"
            ) from error
    counts, places = arrays
    return ClassIndex(dataset.classes, counts, places, folder=index_folder)


def _index_labels(dataset: SegmentationDataset, workers: int | None, progress: Progress) -> list[np.ndarray]:
    """`counts` and `places` of a split, see `ClassIndex`. Every image has its own random stream."""

    def index_image(image: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([_SEED, image])
        return index_label(dataset.read_label(image), len(dataset.classes), POSITIONS, rng)

    counts, places = zip(*map_images(dataset, index_image, workers, progress), strict=True)
    return [np.stack(counts), np.concatenate(places)]


def index_label(
    label: np.ndarray, classes: int, positions: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Count a label's pixels, int64 (classes,), and sample (row, column), see `ClassIndex`, sorted by class.

    `label`: train ids, uint8 (H, W). Each class gets min(pixels, `positions`) distinct pixels; every subset of that
    size is equally likely, as in reservoir sampling. This is faster than reservoirs: it counts the pixels, draws which
    of a class's pixels to keep, and searches only the bands that contain them.
    """
    assert label.dtype == np.uint8, label.dtype
    flat = np.ascontiguousarray(label).reshape(-1)
    starts = range(0, len(flat), _BAND)
    histograms = [cv2.calcHist([flat[i : i + _BAND][None]], [0], None, [256], [0, 256]).ravel() for i in starts]
    counts_to_band = np.stack(histograms)[:, :classes].astype(np.int64).cumsum(axis=0)  # (bands, classes)
    counts = counts_to_band[-1]
    chosen = []
    for class_id in np.flatnonzero(counts):
        ranks = rng.choice(counts[class_id], min(counts[class_id], positions), replace=False, shuffle=False)
        bands = np.searchsorted(counts_to_band[:, class_id], ranks, side="right")
        for band in np.unique(bands):
            start = band * _BAND
            count_before = counts_to_band[band - 1, class_id] if band else 0
            in_class = np.flatnonzero(flat[start : start + _BAND] == class_id)
            chosen.append(start + in_class[ranks[bands == band] - count_before])
    places = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    dtype = np.uint16 if max(label.shape) <= 1 << 16 else np.uint32
    return counts, np.stack(np.divmod(places, label.shape[1]), axis=1).astype(dtype)
