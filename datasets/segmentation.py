"""What every segmentation dataset of this project is: a list of files, a table of classes, checked reading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from torch.utils.data import Dataset

from datasets.reading import EVERYTHING, RESTORE, Window, decode_image, decode_label, read_size

INSTANCES_PER_CLASS = 1000  # in an image; see `SegmentationDataset.scored`
_ILLEGAL = 254  # marks, in the lookup table, a raw value that the label files must not contain; never leaves this file


class Files(NamedTuple):
    """One image of a split: its name, its image file, and its label file (None where the split has no labels).

    Where it was not required that every image has its label, either file may be None.
    """

    name: str
    image: Path | None
    label: Path | None
    instances: Path | None = None  # which instance each pixel belongs to, where the official score asks for it


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

    What only the official evaluation looks at, where there is one, `benchmark`: `official_only` maps classes that it
    counts and the paper does not to their raw values (they are the last of `names`, or ignored in training);
    `categories` has one entry per class; `instance_sizes` maps classes to the average pixels of an instance.
    """

    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    official_ids: tuple[int, ...]
    label_ids: Mapping[int, int]
    ignore_index: int = 255
    official_void: int = 0
    coloured_predictions: bool = False
    benchmark: str | None = None
    official_only: Mapping[str, Sequence[int]] = field(default_factory=dict)
    categories: tuple[str, ...] = ()
    instance_sizes: Mapping[str, float] = field(default_factory=dict)
    _to_train: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_scored: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_official: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_colour: np.ndarray = field(init=False, repr=False, compare=False)  # (256, 3) uint8

    def __post_init__(self):
        count = len(self.names)
        assert count == len(self.palette) == len(self.official_ids) < _ILLEGAL < self.ignore_index <= 255
        assert set(self.label_ids.values()) <= {*range(count), self.ignore_index}
        assert len(self.scored) < _ILLEGAL and self.scored[:count] == self.names
        assert len(self.categories) in (0, count) and set(self.instance_sizes) <= set(self.names)
        to_train = np.full(256, _ILLEGAL, np.uint8)
        for raw, train_id in self.label_ids.items():
            to_train[raw] = train_id
        to_scored = to_train.copy()
        for name, values in self.official_only.items():
            to_scored[list(values)] = self.scored.index(name)
        to_official = np.full(256, self.official_void, np.uint8)
        to_official[:count] = self.official_ids
        to_colour = np.zeros((256, 3), np.uint8)
        to_colour[:count] = self.palette
        tables = {"train": to_train, "scored": to_scored, "official": to_official, "colour": to_colour}
        for name, array in tables.items():
            object.__setattr__(self, f"_to_{name}", array)

    @property
    def counted(self) -> tuple[str, ...]:
        """The classes of the paper's mIoU: `names`, without those that only the official score counts."""
        return tuple(name for name in self.names if name not in self.official_only)

    @property
    def scored(self) -> tuple[str, ...]:
        """Every ground-truth class of a score: `counted`, then `official_only`."""
        return self.counted + tuple(self.official_only)

    def train_ids(self, raw: np.ndarray) -> np.ndarray:
        """Raw label values, uint8 (H, W) -> train ids, uint8 (H, W). UnknownIds names values outside the table."""
        return self._mapped(raw, self._to_train)

    def scored_ids(self, raw: np.ndarray) -> np.ndarray:
        """As `train_ids`, but positions in `scored`: of the trained classes their train ids, the others behind them."""
        return self._mapped(raw, self._to_scored)

    def _mapped(self, raw: np.ndarray, table: np.ndarray) -> np.ndarray:
        mapped = cv2.LUT(raw, table)
        if (mapped == _ILLEGAL).any():
            foreign = sorted(set(np.unique(raw).tolist()) - set(self.label_ids))
            raise UnknownIds(
                f"contains the ids {_shortened(foreign)}, which are not in the class table; expected only "
                f"{_ranges(self.label_ids)}"
            )
        return mapped

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

    `name` is the dataset's ("cityscapes"), `files` its images in a fixed order. `decode_label` reads the raw
    values in a window of a label file, uint8 (H, W); `decode_instances` a file of instances, as `scored` returns it.
    Reading checks what it reads and raises a ValueError that names the file, what is wrong with it, what was expected
    and what to do.
    """

    def __init__(
        self,
        name: str,
        split: str,
        files: Sequence[Files],
        table: ClassTable,
        decode_label: Callable[[Path, Window], np.ndarray] = decode_label,
        decode_instances: Callable[[Path], np.ndarray] | None = None,
    ):
        self.name = name
        self.split = split
        self.files = tuple(Files(*entry) for entry in files)
        self.table = table
        self.decode_label = decode_label
        self.decode_instances = decode_instances

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

    @property
    def has_instances(self) -> bool:
        """Whether every image has a file of instances."""
        return all(entry.instances is not None for entry in self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self.table.train_ids)

    def scored(self, index: int) -> tuple[Sample, np.ndarray | None]:
        """What an evaluation compares: as `dataset[index]` but with the label in `ClassTable.scored_ids`; instances.

        Instances: int32 (H, W), INSTANCES_PER_CLASS * train id + number, and -1 where no single instance of an
        evaluated class is marked. None unless every image has them.
        """
        sample = self._sample(index, self.table.scored_ids)
        if sample.label is None or not self.has_instances:
            return sample, None
        entry = self.files[index]
        instances = self.decode_instances(entry.instances)
        if instances.shape != sample.label.shape:
            raise ValueError(
                size_mismatch(entry._replace(label=entry.instances), sample.label.shape[::-1], instances.shape[::-1])
            )
        return sample, instances

    def _sample(self, index: int, ids: Callable[[np.ndarray], np.ndarray]) -> Sample:
        entry = self.files[index]
        image = self.read_image(index)
        label = None if entry.label is None else self._read_label(index, ids)
        if label is not None and label.shape != image.shape[:2]:
            raise ValueError(size_mismatch(entry, image_size=image.shape[1::-1], label_size=label.shape[::-1]))
        return Sample(image=image, label=label, name=entry.name)

    def size(self, index: int) -> tuple[int, int]:
        """(H, W) of image `index`, from the headers of its files. ValueError where its label's size is another."""
        entry = self.files[index]
        width, height = read_size(entry.image)
        if entry.label is not None and (label_size := read_size(entry.label)) != (width, height):
            raise ValueError(size_mismatch(entry, image_size=(width, height), label_size=label_size))
        return height, width

    def read_image(self, index: int, window: Window = EVERYTHING) -> np.ndarray:
        """Image `index` or a window of it, uint8 (H, W, 3) RGB.

        ValueError where the file is missing, truncated or not an image. What lies below the window is not checked.
        """
        return decode_image(self.files[index].image, window)

    def read_label(self, index: int, window: Window = EVERYTHING) -> np.ndarray:
        """Label of image `index` or a window of it, as train ids, uint8 (H, W).

        ValueError where the file is bad or an id in the window is foreign.
        """
        return self._read_label(index, self.table.train_ids, window)

    def _read_label(
        self, index: int, ids: Callable[[np.ndarray], np.ndarray], window: Window = EVERYTHING
    ) -> np.ndarray:
        path = self.files[index].label
        if path is None:
            raise ValueError(
                f"{self.name} has no labels in split {self.split!r} ({self.files[index].name}); "
                "choose a split with labels, such as val"
            )
        raw = self.decode_label(path, window)
        try:
            return ids(raw)
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
