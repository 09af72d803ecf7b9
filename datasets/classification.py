"""A classification dataset: a list of images in files or in memory, a class for each, and checked reading."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from datasets.file_list import FileList
from datasets.reading import ALL_16, Range16, decode_image
from datasets.segmentation import restorable
from datasets.stored import COLOURS


@dataclass(eq=False, repr=False)
class ClassificationDataset(Dataset):
    """Images of one split with a class each.

    `name`: the dataset, e.g. "imagenet". `classes`: names of the classes. `labels`: the class of every image, int64
    (images,). `files`: one per image, unless all images are in memory: then `pixels` are uint8 (images, 3, H, W) RGB,
    and `names` their names. `mean_image`: see `minus`. `turned`: EXIF orientation is applied.
    `range16`: see `decode_image`. `remarks`: see `layout.remarks_on`.
    """

    palette = None  # classes have no colours
    label_ids = ()  # no label files
    numbering = ""  # no label files
    has_labels = True
    channels = COLOURS
    channels_key = None  # always red, green and blue
    shown = None
    palette_fix = None

    name: str
    split: str
    classes: tuple[str, ...]
    labels: np.ndarray
    files: FileList
    pixels: np.ndarray | None = None
    names: np.ndarray | None = None
    mean_image: np.ndarray | None = None
    turned: bool = False
    range16: Range16 = ALL_16
    remarks: tuple[str, ...] = ()
    digests: np.ndarray | None = field(default=None, init=False)  # of the image files, set by `verify`
    sizes: Sequence[tuple[int, int, int]] = field(default=(), init=False)  # width, height, number of images; as well

    def __post_init__(self) -> None:
        assert (self.pixels is None) == (self.names is None)
        assert len(self.labels) == len(self.files if self.pixels is None else self.pixels)
        assert self.names is None or len(self.names) == len(self.labels)
        self.labels = self.labels.astype(np.int64, copy=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_files(self) -> bool:
        """Whether images are read from `files`; not if they are in memory."""
        return self.pixels is None

    def __repr__(self) -> str:
        counts = f"{len(self):,} images of {self.channels} channels, {len(self.classes)} classes"
        return f"{type(self).__name__}({self.name} {self.split}: {counts})"

    def names_and_sizes(self) -> tuple[str, str]:
        """Hashes of the files' names below the dataset's folder, and of their sizes."""
        return self.files.names_and_sizes()

    def fingerprint(self, version: list) -> str:
        """Hexadecimal hash of the files, the classes and `version`, see `FileList.fingerprint`."""
        return self.files.fingerprint([version, self.name, self.split, *self.classes])

    def first(self, count: int) -> "ClassificationDataset":
        """The same dataset with its first `count` images."""
        files: dict[str, Any] = {name: getattr(self.files, name)[:count] for name in ("names", "sizes", "times")}
        arrays = {name: getattr(self, name) for name in ("labels", "pixels", "names")}
        parts: dict[str, Any] = {name: None if array is None else array[:count] for name, array in arrays.items()}
        return replace(self, **parts, files=replace(self.files, **files))

    def label(self, number: int) -> int:
        return int(self.labels[number])

    def image_name(self, number: int) -> str:
        """Unique in the split: an image file's path below the split's folder, or the image's name in memory."""
        return self.files.name(number) if self.names is None else str(self.names[number])

    def path(self, number: int) -> Path:
        """The file of an image that is not in memory."""
        assert self.pixels is None, f"{self.name} is in memory"
        return self.files.path(number)

    def minus(self, mean_image: np.ndarray) -> "ClassificationDataset":
        """The dataset with `mean_image`, float64 (3, H, W), subtracted from the images in `pixels_of`."""
        return replace(self, mean_image=mean_image)

    def pixels_of(self, numbers: np.ndarray) -> np.ndarray:
        """Several of `pixels`: uint8 (n, 3, H, W) RGB, or float32 with a `mean_image`, still in levels of 255."""
        assert self.pixels is not None, f"{self.name} is in files"
        chosen = self.pixels[numbers]
        return chosen if self.mean_image is None else (chosen - self.mean_image).astype(np.float32)

    def image(self, number: int) -> np.ndarray:
        """An image in a file, uint8 (H, W, 3) RGB.

        Unless `turned`, EXIF orientation is ignored, as in published ImageNet results.
        ValueError if the file is missing, truncated or neither PNG nor JPEG, whatever its suffix.
        """
        with restorable():
            return decode_image(self.path(number), turned=self.turned, range16=self.range16)


def mean_image(dataset: ClassificationDataset) -> np.ndarray:
    """The mean over all images of a split in memory, float64 (3, H, W)."""
    assert dataset.pixels is not None, f"{dataset.name} is in files"
    return dataset.pixels.sum(axis=0, dtype=np.int64) / len(dataset)  # sums of integers are exact
