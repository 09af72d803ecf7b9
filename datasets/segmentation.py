"""What every segmentation dataset of this project is: a list of files, a table of classes, checked reading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from torch.utils.data import Dataset

from datasets.reading import RESTORE, decode_image, decode_label

_ILLEGAL = 254  # marks, in the lookup table, a raw value that the label files must not contain; never leaves this file


class Files(NamedTuple):
    """One image of a split: its name, its image file, and its label file (None where the split has no labels).

    Where it was not required that every image has its label, either file may be None.
    """

    name: str
    image: Path | None
    label: Path | None


class UnknownIds(ValueError):
    """A label file holds values that are not in the class table."""


class Sample(NamedTuple):
    """`image`: uint8 (H, W, 3) RGB. `label`: uint8 (H, W) train ids or ignore, None without labels. `name`: unique."""

    image: np.ndarray
    label: np.ndarray | None
    name: str


@dataclass(frozen=True)
class ClassTable:
    """The classes of a dataset in train-id order, and how its files and its official evaluation number them.

    `names`, `palette` (RGB, 0-255) and `official_ids` have one entry per class. `label_ids` maps every raw value that a
    label file may contain to a train id or to `ignore_index`; any other raw value is an error. `official_void` is what
    an ignored pixel becomes in an official prediction file; `coloured_predictions`: such files carry the palette.
    """

    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    official_ids: tuple[int, ...]
    label_ids: Mapping[int, int]
    ignore_index: int = 255
    official_void: int = 0
    coloured_predictions: bool = False
    _to_train: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_official: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_colour: np.ndarray = field(init=False, repr=False, compare=False)  # (256, 3) uint8

    def __post_init__(self):
        count = len(self.names)
        assert count == len(self.palette) == len(self.official_ids) < _ILLEGAL < self.ignore_index <= 255
        assert set(self.label_ids.values()) <= {*range(count), self.ignore_index}
        to_train = np.full(256, _ILLEGAL, np.uint8)
        for raw, train_id in self.label_ids.items():
            to_train[raw] = train_id
        to_official = np.full(256, self.official_void, np.uint8)
        to_official[:count] = self.official_ids
        to_colour = np.zeros((256, 3), np.uint8)
        to_colour[:count] = self.palette
        for name, array in (("_to_train", to_train), ("_to_official", to_official), ("_to_colour", to_colour)):
            object.__setattr__(self, name, array)

    def train_ids(self, raw: np.ndarray) -> np.ndarray:
        """Raw label values, uint8 (H, W) -> train ids, uint8 (H, W). UnknownIds names values outside the table."""
        train_ids = cv2.LUT(raw, self._to_train)
        if (train_ids == _ILLEGAL).any():
            foreign = sorted(set(np.unique(raw).tolist()) - set(self.label_ids))
            raise UnknownIds(
                f"contains the ids {_shortened(foreign)}, which are not in the class table; expected only "
                f"{_ranges(self.label_ids)}"
            )
        return train_ids

    def official(self, train_ids: np.ndarray) -> np.ndarray:
        """Train ids, uint8 (H, W) -> ids of the official prediction files, uint8 (H, W)."""
        assert train_ids.dtype == np.uint8, f"train ids are uint8, got {train_ids.dtype}"
        return self._to_official[train_ids]

    def colour(self, train_ids: np.ndarray) -> np.ndarray:
        """Train ids, uint8 (H, W) -> RGB uint8 (H, W, 3); what is ignored is black."""
        assert train_ids.dtype == np.uint8, f"train ids are uint8, got {train_ids.dtype}"
        return self._to_colour[train_ids]


class SegmentationDataset(Dataset):
    """Images of one split with their labels in train ids.

    `name` is the dataset's ("cityscapes"), `files` its images in a fixed order. `decode_label` reads a label file's raw
    values, uint8 (H, W). Reading checks what it reads and raises a ValueError that names the file, what is wrong with
    it, what was expected and what to do.
    """

    def __init__(
        self,
        name: str,
        split: str,
        files: Sequence[Files],
        table: ClassTable,
        decode_label: Callable[[Path], np.ndarray] = decode_label,
    ):
        self.name = name
        self.split = split
        self.files = tuple(Files(*entry) for entry in files)
        self.table = table
        self.decode_label = decode_label

    @property
    def classes(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def palette(self) -> tuple[tuple[int, int, int], ...]:
        return self.table.palette

    @property
    def ignore_index(self) -> int:
        return self.table.ignore_index

    @property
    def has_labels(self) -> bool:
        """Whether every image has a label; False for test splits whose labels are withheld."""
        return all(entry.label is not None for entry in self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        entry = self.files[index]
        image = self.read_image(index)
        label = None if entry.label is None else self.read_label(index)
        if label is not None and label.shape != image.shape[:2]:
            raise ValueError(size_mismatch(entry, image_size=image.shape[1::-1], label_size=label.shape[::-1]))
        return Sample(image=image, label=label, name=entry.name)

    def read_image(self, index: int) -> np.ndarray:
        """Image `index` as uint8 (H, W, 3) RGB. ValueError where the file is missing, truncated or not an image."""
        return decode_image(self.files[index].image)

    def read_label(self, index: int) -> np.ndarray:
        """Label of image `index` as train ids, uint8 (H, W). ValueError where the file or one of its ids is bad."""
        path = self.files[index].label
        if path is None:
            raise ValueError(
                f"{self.name} has no labels in split {self.split!r} ({self.files[index].name}); "
                "choose a split with labels, such as val"
            )
        raw = self.decode_label(path)
        try:
            return self.table.train_ids(raw)
        except UnknownIds as error:
            raise UnknownIds(
                f"{path}: {error}. Check that this is the label file that {self.name} distributes (not a colour "
                "picture, nor labels converted by another tool)."
            ) from None

    def encode_prediction(self, train_ids: np.ndarray) -> np.ndarray:
        """Predicted train ids, uint8 (H, W) -> what the official prediction file contains, uint8 (H, W)."""
        return self.table.official(train_ids)

    @property
    def prediction_palette(self) -> np.ndarray | None:
        """Colours of an official prediction file, uint8 (256, 3) RGB by id; None where it is without colours."""
        if not self.table.coloured_predictions:
            return None
        palette = np.zeros((256, 3), np.uint8)
        palette[list(self.table.official_ids)] = self.palette
        return palette

    def prediction_filename(self, name: str) -> str:
        """The file, relative to the folder of predictions, where the official evaluation finds the image `name`."""
        return f"{name}.png"

    def colour(self, train_ids: np.ndarray) -> np.ndarray:
        """Train ids, uint8 (H, W) -> RGB uint8 (H, W, 3) in the dataset's palette; what is ignored is black."""
        return self.table.colour(train_ids)


def size_mismatch(entry: Files, image_size: tuple[int, int], label_size: tuple[int, int]) -> str:
    """The message for an image and a label of different sizes; sizes are (width, height) in pixels."""
    return (
        f"{entry.label}: the label is {label_size[0]}x{label_size[1]} pixels and its image {entry.image} is "
        f"{image_size[0]}x{image_size[1]}; expected the same size. {RESTORE}"
    )


def _shortened(values: list[int], limit: int = 8) -> str:
    more = f", … ({len(values)} in all)" if len(values) > limit else ""
    return ", ".join(map(str, values[:limit])) + more


def _ranges(values: Mapping[int, int]) -> str:
    """{0, 1, 2, 5} -> "0-2, 5"."""
    text, ordered = [], sorted(values)
    start = previous = ordered[0]
    for value in [*ordered[1:], None]:
        if value is None or value != previous + 1:
            text.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = value
        previous = value
    return ", ".join(text)
