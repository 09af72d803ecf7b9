"""A segmentation dataset: a list of files, a table of classes and checked reading."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from datasets.class_table import ClassTable, UnknownIds, check_form, check_train_ids
from datasets.file_list import FileList, file_list_of, readable
from datasets.reading import ALL_16, EVERYTHING, Range16, Window, decode_image, decode_label, image_size
from datasets.stored import COLOURS, SWAPS_SIDES, Stored, Unreadable, read

RESTORE = "Restore the file from the dataset's archive, or your own image from its source."
_TURNED_FIX = (
    "The image's EXIF orientation turns it, but nothing turns the label: turn the labels too, or take the orientation "
    "out of the images, as exiftool -Orientation= DIR does."
)


class Files(NamedTuple):
    """One image of a split: its name, its image file, and its label file (None if the split has no labels)."""

    name: str
    image: Path
    label: Path | None = None


class FileTable(Sequence[Files]):
    """The files of a split in one array, which workers share, as in `FileList`.

    ValueError: an entry is of another kind.
    """

    def __init__(self, files: Iterable[Files]) -> None:
        rows = []
        for entry in files:
            if not isinstance(entry, Files):
                raise ValueError(f"files hold {entry!r}: expected Files(name, image, label)")
            rows.append([os.fsencode(part or "") for part in entry])
        self.rows = np.array(rows, np.bytes_).reshape(-1, 3)  # name, image and label of each entry

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(len(self))[number]]
        name, image, label = map(os.fsdecode, self.rows[number].tolist())
        return Files(name, Path(image), Path(label) if label else None)


class Sample(NamedTuple):
    """`image`: uint8 (H, W, channels). `label`: train ids, uint8 (H, W), or None without labels. `name`: unique."""

    image: np.ndarray
    label: np.ndarray | None
    name: str


@dataclass(frozen=True)
class Undecoded:
    """An image or label whose file has been read. It slices like an array: slicing decodes only that window."""

    shape: tuple[int, int]  # (H, W)
    decode: Callable[[Window], np.ndarray]

    def __getitem__(self, window: Window) -> np.ndarray:
        return self.decode(window)


@contextmanager
def restorable(fix: str = RESTORE) -> Iterator[None]:
    """Context or decorator for reading a dataset's file: an error about an unreadable file ends with the fix."""
    try:
        yield
    except Unreadable as error:
        raise ValueError(f"{error} {fix}") from None


@dataclass(eq=False, repr=False)
class SegmentationDataset(Dataset):
    """Images of one split with their labels in train ids.

    `name`: the dataset, e.g. "cityscapes". `files`: its images in a fixed order. `decode_label` returns the raw values
    in a window of a label file, uint8 (H, W). `turned`, `range16`: see `decode_image`; `turned` is true for the user's
    own images. Reading checks the files: a ValueError names the file, the problem, the expected content and the fix.
    `label_fix` is the fix for wrong labels that no archive can restore; labels whose palettes differ are refused if
    there is a `palette_fix`. `remarks`: sentences on files in its folders, see `layout.remarks_on`. `channels`: of an
    image; `channels_key`: the option that sets them, for messages, if there is one; `shown`: those that pictures show,
    see `visible`.
    """

    mean_image = None  # only small images have one

    name: str
    split: str
    files: Sequence[Files]
    table: ClassTable
    decode_label: Callable[[Stored, Window], np.ndarray] = decode_label
    turned: bool = False
    range16: Range16 = ALL_16
    label_fix: str | None = None
    palette_fix: str | None = None
    remarks: tuple[str, ...] = ()
    channels: int = COLOURS
    channels_key: str | None = None
    shown: Sequence[int] | None = None
    digests: np.ndarray | None = field(default=None, init=False)  # of the image files, set by `verify`
    sizes: Sequence[tuple[int, int, int]] = field(default=(), init=False)  # width, height, number of images; as well
    has_labels: bool = field(init=False)  # False for test splits whose labels are withheld

    def __post_init__(self) -> None:
        self.files = FileTable(self.files)
        self.has_labels = bool(self.files.rows[:, 2].all())

    @property
    def has_files(self) -> bool:
        """Whether images are read from `files`; not if a subclass makes its samples itself, such as from Parquet."""
        return type(self).__getitem__ is SegmentationDataset.__getitem__

    @property
    def classes(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def palette(self) -> tuple[tuple[int, int, int], ...]:
        return self.table.palette

    @property
    def label_ids(self) -> tuple[int, ...]:
        """The id of each class in labels and predictions."""
        return self.table.official_ids

    def __repr__(self) -> str:
        counts = f"{len(self):,} images of {self.channels} channels, {len(self.classes)} classes"
        return f"{type(self).__name__}({self.name} {self.split}: {counts})"

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self.files[index].image

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        entry = self.files[index]
        image = self.read_image(index)
        label = None if entry.label is None else self._decode_label(self._stored_label(index), self.table.train_ids)
        if label is not None:
            self.check_size(entry, image.shape[1::-1], label.shape[::-1])
        return Sample(image=image, label=label, name=entry.name)

    def sample(self, index: int) -> Sample:
        """`self[index]`. ValueError: see `__getitem__`; or a subclass that makes it makes something else."""
        sample = self[index]
        if not self.has_files:
            image, label, _ = sample
            source = f"{type(self).__name__} made {readable(self.files[index].name)} with"
            size = np.shape(image)[:2]
            check_form(f"{source} an image of", image, f"uint8 {(*size, self.channels)}")
            if label is not None:
                check_form(f"{source} a label of", label, f"uint8 {size}")
                check_train_ids(f"{source} a label", label, len(self.classes))
        return sample

    def undecoded(self, index: int) -> tuple[Undecoded, Undecoded]:
        """Read the files of image and label `index` once. Slicing the results decodes no more than the slice needs.

        A slice has the same pixels as a slice of `dataset[index]`. ValueError if a file is missing or truncated, or the
        sizes of image and label differ; when slicing, for damaged pixels and unknown ids down to the slice.
        """
        if not self.has_files:
            arrays: tuple[Any, ...] = self.sample(index)[:2]
            image, label = (Undecoded(array.shape[:2], array.__getitem__) for array in arrays)
            return image, label
        with restorable():
            stored = read(self.path(index), self.turned)
            stored_label = self._stored_label(index)
            image = _undecoded(stored, partial(self._decode_image, stored), self.turned, self.channels)
            label = _undecoded(stored_label, partial(self._decode_label, stored_label, self.table.train_ids))
        self.check_size(self.files[index], image.shape[::-1], label.shape[::-1])
        return image, label

    def first(self, count: int) -> "SegmentationDataset":
        """The same dataset with its first `count` images."""
        dataset = copy(self)
        dataset.files = FileTable(self.files[:count])
        return dataset

    @restorable()
    def _decode_image(self, file: Path | Stored, window: Window = EVERYTHING) -> np.ndarray:
        return decode_image(file, window, self.turned, self.range16, self.channels)

    def read_image(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, channels), of three RGB.

        ValueError if the file is missing, truncated or not an image, or has another number of channels.
        """
        if not self.has_files:
            return self.sample(index).image
        return self._decode_image(self.path(index))

    def read_label(self, index: int) -> np.ndarray:
        """Label of image `index` as train ids, uint8 (H, W). ValueError if the file is bad or holds an unknown id."""
        if not self.has_files:
            label = self.sample(index).label
            if label is not None:
                return label
        return self._decode_label(self._stored_label(index), self.table.train_ids)

    def raw_label(self, index: int) -> np.ndarray:
        """Like `read_label`, but the values in the file."""
        return self._decode_label(self._stored_label(index), self.table.raw_ids)

    def _stored_label(self, index: int) -> Stored:
        path = self.files[index].label
        if path is None:
            raise ValueError(
                f"{self.name} has no labels in split {self.split!r} ({readable(self.files[index].name)}); "
                "choose a split with labels, such as val"
            )
        with restorable(self.label_fix or RESTORE):
            return read(path, photograph=self.turned)

    def _decode_label(
        self, file: Stored, to_ids: Callable[[np.ndarray], np.ndarray], window: Window = EVERYTHING
    ) -> np.ndarray:
        """What `to_ids` returns for the raw values in a window of a label file, uint8 (H, W).

        UnknownIds: it refuses a value; the message names the file and ends with the fix. ValueError: the file is bad.
        """
        try:
            with restorable(self.label_fix or RESTORE):
                return to_ids(self.decode_label(file, window))
        except UnknownIds as error:
            default_fix = (
                f"Check that this is an original label file of {self.name} "
                "(not a colour picture or labels converted by another tool)."
            )
            raise UnknownIds(f"{file.path}: {error}. {self.label_fix or default_fix}") from None

    def check_size(self, entry: Files, image_size: tuple[int, ...], label_size: tuple[int, ...]) -> None:
        """ValueError if the sizes of an image and its label, (width, height) in pixels, differ."""
        if label_size == image_size:
            return
        fix = self.label_fix or RESTORE
        is_swapped = self.turned and label_size == image_size[::-1]
        if is_swapped and read(entry.image, photograph=True).orientation in SWAPS_SIDES:
            fix = _TURNED_FIX
        raise ValueError(
            f"{readable(entry.label)}: the label is {label_size[0]}x{label_size[1]} pixels and its image "
            f"{readable(entry.image)} is {image_size[0]}x{image_size[1]}; expected the same size. {fix}"
        )

    @property
    def prediction_palette(self) -> np.ndarray | None:
        """Colours of an official prediction file, uint8 (256, 3) RGB by id; None if it has none."""
        if not self.table.coloured_predictions:
            return None
        palette = np.zeros((256, 3), np.uint8)
        palette[list(self.table.official_ids)] = self.palette
        return palette

    def names_and_sizes(self) -> tuple[str, str]:
        """Hexadecimal hashes of the files' names below the dataset's folder, and of their sizes."""
        return self._file_list().names_and_sizes()

    @property
    def numbering(self) -> str:
        """Hexadecimal hash of how label files number the classes, ignored ones among them."""
        return hashlib.sha256(repr(sorted(self.table.label_ids.items())).encode()).hexdigest()

    def fingerprint(self, version: list) -> str:
        """Hexadecimal hash under which results computed from the files are cached.

        It covers the paths below the folder, sizes and modification times of all files, the class table's label ids
        and colours, and `version`, which identifies the code that reads them. It does not change if the whole folder
        is moved.
        """
        classes = [sorted(self.table.label_ids.items()), *sorted(self.table.label_colours.items())]
        return self._file_list().fingerprint([version, self.name, self.split, *classes])

    def _file_list(self) -> FileList:
        assert isinstance(self.files, FileTable)
        paths = [os.fsdecode(path) for path in self.files.rows[:, 1:].ravel().tolist() if path]
        top = os.path.commonpath({os.path.dirname(path) for path in paths}) if paths else ""
        return file_list_of(Path(top), paths)


def _undecoded(
    file: Stored, decode: Callable[[Window], np.ndarray], turned: bool = False, channels: int = COLOURS
) -> Undecoded:
    """An image or label of a file that has been read; decoded at once if no part of it can be decoded alone."""
    if not file.has_windows:
        pixels = decode(EVERYTHING)
        return Undecoded((pixels.shape[0], pixels.shape[1]), pixels.__getitem__)
    return Undecoded(image_size(file, turned, channels)[::-1], decode)


def join_splits(parts: Sequence[SegmentationDataset]) -> SegmentationDataset:
    """Several splits of a dataset as one, in this order.

    ValueError if their labels number the classes differently, or their samples are not read from files.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not all(part.has_files for part in parts):
        raise ValueError(f"{first.name} makes its samples itself: give one split, which holds all")
    for part in parts[1:]:
        if part.table != first.table:
            raise ValueError(
                f"the labels of the splits {first.split} and {part.split} of {first.name} number the classes "
                f"differently; expected labels of one kind"
            )
    files = [entry for part in parts for entry in part.files]
    remarks = tuple(dict.fromkeys(sentence for part in parts for sentence in part.remarks))
    return replace(first, split="+".join(part.split for part in parts), files=files, remarks=remarks)


def visible(channels: int, shown: Sequence[int] | None = None) -> tuple[int, ...]:
    """The places of the channels that a picture shows as red, green and blue.

    `shown`: one or three of them, counted from 1; None: the first three, of one or two the first.
    """
    chosen = [number - 1 for number in shown or ()] or [*range(COLOURS if channels >= COLOURS else 1)]
    return (*chosen,) if len(chosen) == COLOURS else (chosen[0],) * COLOURS


def picture(image: np.ndarray, shown: Sequence[int] | None = None) -> np.ndarray:
    """What a picture shows of an image, uint8 (H, W, C) -> uint8 (H, W, 3) RGB. `shown`: see `visible`."""
    places = visible(image.shape[2], shown)
    return image if places == (*range(image.shape[2]),) else np.ascontiguousarray(image[..., places])
