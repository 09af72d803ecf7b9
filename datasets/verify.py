"""Checks of a whole split.

`verify` runs before a training and remembers success. `inspect` is run by hand: it decodes and counts all pixels.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets.cache import cache_folder
from datasets.class_table import IGNORED, Palettes, UnknownIds
from datasets.classification import ClassificationDataset
from datasets.file_list import readable
from datasets.levels import Use, doubts_of_levels, is_decoded, use_of
from datasets.reading import decode_values, further_channels, image_size, label_palette
from datasets.segmentation import SegmentationDataset, restorable
from datasets.stored import COLOURS, SWAPS_SIDES, Stored, read
from datasets.workers import Progress, map_in_order

_CHECKS = 12  # increment when the checks change: all data is then checked again
_SHOWN = 5
_UNREADABLE = "unreadable image"  # a kind of `Problem`
_REMEMBERED = ("values", "holding", "digests", "used", "sizes", "remarks")  # fields of `Inspection`

Split = SegmentationDataset | ClassificationDataset


class Problem(NamedTuple):
    """`kind` groups similar problems: "unreadable image", "unknown ids", …. `message` names the file."""

    kind: str
    message: str


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    `problems` are in the order of the files. Over all readable labels, `values` counts the pixels of each raw value,
    `holding` the labels that hold each train id (in a classification, the images of each class). `digests`: `digest` of
    each image file. `used`: the `Use` of each image that was decoded. `sizes`: (width, height, images) for each size of
    images. `remarks`: sentences on palettes, and on pages and channels that are not read.
    """

    dataset: Split
    problems: tuple[Problem, ...]
    values: list[int]
    holding: list[int]
    digests: list[int]
    used: Sequence[Sequence] = ()
    sizes: Sequence[tuple[int, int, int]] = ()
    remarks: Sequence[str] = ()

    @property
    def by_class(self) -> np.ndarray:
        """Pixels of each train id, with unclassified pixels at 255, int64 (256,); zeros for classification."""
        table = self.dataset.table if isinstance(self.dataset, SegmentationDataset) else None
        return np.zeros(256, np.int64) if table is None else table.by_class(np.array(self.values))

    def doubts(self, images: str, keys: str | None = "") -> list[str]:
        """What may be wrong although every file is intact.

        `images`: e.g. "training image"; `keys`: see `doubts_of_levels`.
        """
        split_images = f"images of {self.dataset.split}"
        doubts = []
        if isinstance(self.dataset, ClassificationDataset):
            absent = [name for name, count in zip(self.dataset.classes, self.holding, strict=True) if not count]
            if absent:
                doubts.append(f"no {images} shows {', '.join(absent)}: check the labels and the classes")
        elif self.dataset.has_labels:
            doubts += self.dataset.table.doubts(np.array(self.values), images)
        return [*doubts, *self.remarks, *doubts_of_levels(self.used, self.dataset.range16, split_images, keys)]


def verify(
    dataset: Split,
    workers: int | None = None,
    progress: Progress = None,
    keys: str | None = "",
    images: str = "training image",
) -> list[str]:
    """`inspect` a split quickly, once. ValueError: there are problems (the first are listed), or no pixel has a class.

    Returns doubts, such as classes that no image shows (`keys`, `images`: see `Inspection.doubts`), and sets the
    split's `digests` and `sizes`. TimeoutError names the first image that takes longer than `reading_errors` around
    this call allows. The cache folder remembers success until a path, size or modification time changes. If there is
    none, or it cannot be written, the check runs every time.
    """
    key = dataset.fingerprint([_CHECKS, [*dataset.range16], dataset.palette_fix, dataset.channels])
    folder = cache_folder() if dataset.has_files else None  # no file tells whether other samples are as they were
    success_file = (folder or Path(os.devnull)) / "verified" / key  # below /dev/null, none is read or written
    inspection = _remembered_inspection(dataset, success_file)
    title = f"{dataset.name}, split {dataset.split!r}"
    if inspection is None:
        inspection = inspect(dataset, workers, progress, decode=False)
        problems = inspection.problems
        if problems:
            lines = "\n".join(f"  {line}" for line in first_lines([problem.message for problem in problems]))
            raise ValueError(f"{title}: {len(problems)} problem(s) in {len(dataset)} images:\n{lines}")
        _remember(inspection, success_file)
    dataset.digests = np.array(inspection.digests, np.uint64)
    dataset.sizes = inspection.sizes
    if any(inspection.values) and not any(inspection.by_class[:IGNORED]):
        reasons = ". ".join(inspection.doubts("image"))
        raise ValueError(f"{title}: no pixel has a class, so nothing can be learnt or scored: {reasons}")
    return inspection.doubts(images, keys)


def _remember(inspection: Inspection, file: Path) -> None:
    """Write an inspection without problems to a file, if it can be written."""
    with suppress(OSError):  # a read-only cache folder only costs the time of the next check
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([getattr(inspection, name) for name in _REMEMBERED]))


def _remembered_inspection(dataset: Split, file: Path) -> Inspection | None:
    """What `_remember` wrote; None if there is no such file, or it is damaged."""
    try:
        return Inspection(dataset, (), *json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def digest(content: Any) -> int:
    """64 bits of a hash of bytes, or of a contiguous array.

    (Not CRC-32: it is the same for all PNGs whose chunks have the same lengths.)
    """
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def shared_images(first: Split, second: Split, read_files: bool = True) -> int:
    """The number of images of `second` that are also in `first`: the same bytes, under whatever name.

    What `verify` has read is not read again; of other splits, files of a size that both have are read. Without
    `read_files` only paths are compared.
    """
    if read_files:
        return int(np.isin(_digests(second, first), _digests(first, second)).sum())
    if isinstance(first, ClassificationDataset) or isinstance(second, ClassificationDataset):
        return len(second) if first.split == second.split else 0
    if not (first.has_files and second.has_files):
        return 0
    paths = {entry.image for entry in first.files}
    return sum(entry.image in paths for entry in second.files)


def _digests(split: Split, other: Split) -> np.ndarray:
    """Hashes of a split's images, uint64.

    Reads the files that `verify` has not read, but only if `other` has a file of the same size.
    """
    if isinstance(split, ClassificationDataset) and split.pixels is not None:
        return np.array([digest(image) for image in split.pixels], np.uint64)
    if split.digests is not None:
        return split.digests
    files = [split.path(number) for number in range(len(split))]
    other_sizes = {os.path.getsize(other.path(number)) for number in range(len(other))}
    candidates = [file for file in files if os.path.getsize(file) in other_sizes]
    return np.array([digest(file.read_bytes()) for file in candidates], np.uint64)


def inspect(dataset: Split, workers: int | None = None, progress: Progress = None, decode: bool = True) -> Inspection:
    """Check every image and label of a split: that they are complete, of the same size, and hold known ids.

    Returns problems instead of raising them. Labels are decoded, and so are all images of a classification that are in
    files; other images only with `decode`, else they are read, and only some decoded. PNG files have checksums, so any
    damage is found. JPEG files have none: decoders fill damaged parts with other pixels, so only a damaged header or a
    missing end is found. `workers`: see `map_in_order`.
    """
    problems = list[Problem]()
    digests = list[int]()
    uses = list[Use]()
    notes = defaultdict[str, dict[str, int]](dict)
    values = np.zeros(256, np.int64)
    holding = np.zeros(256, np.int64)
    sizes = Counter[tuple[int, int]]()
    palettes = Palettes(dataset.table.label_palette if isinstance(dataset, SegmentationDataset) else {})
    is_in_memory = isinstance(dataset, ClassificationDataset) and not dataset.has_files
    looks = () if is_in_memory else map_images(dataset, partial(_look_at, dataset, decode), workers, progress)
    for index, seen in enumerate(looks):
        problems += seen.problems
        digests.append(seen.digest)
        uses += filter(None, [seen.used])
        sizes.update(filter(None, [seen.size]))
        for kind, number in seen.notes.items():
            notes[kind][str(dataset.path(index))] = number
        if isinstance(dataset, SegmentationDataset) and seen.pixels is not None:
            values += seen.pixels
            holding += dataset.table.by_class(seen.pixels) > 0
        if seen.palette is not None:
            palettes.add(*seen.palette)
    remarks = [*notes_as_remarks(notes, dataset.channels_key)]
    if isinstance(dataset, SegmentationDataset):
        palette_problems, palette_remarks = _compare_palettes(dataset, palettes)
        problems += palette_problems
        remarks += palette_remarks
    else:
        holding = np.bincount(dataset.labels, minlength=len(dataset.classes))
    size_counts = [(*size, images) for size, images in sizes.items()]
    return Inspection(dataset, tuple(problems), values.tolist(), holding.tolist(), digests, uses, size_counts, remarks)


def _compare_palettes(dataset: SegmentationDataset, palettes: Palettes) -> tuple[list[Problem], list[str]]:
    """Problems and remarks on the palettes of all labels."""
    remarks = palettes.swap_remarks(dataset.table.label_colours)
    if dataset.palette_fix is None:
        return [], [*filter(None, [palettes.conflict]), *remarks]
    problems = []
    if palettes.conflict is not None:
        problems.append(Problem("palettes differ", f"{palettes.conflict}. {dataset.palette_fix}"))
    about_grays = palettes.about_grays(dataset.table)
    if about_grays and palettes.grays_fit(dataset.table):
        problems.append(Problem("gray palettes", f"{about_grays}. {dataset.palette_fix}"))
    elif about_grays:
        remarks.append(about_grays)
    return problems, remarks


def notes_as_remarks(notes: Mapping[str, Mapping[str, int]], key: str | None = None) -> Iterator[str]:
    """A sentence on each kind of images that a training may not read as meant: {kind: {file: its number}}.

    `key`: the option that sets the number of channels, if there is one.
    """
    as_channels = f"; {key}=N reads the pages of a TIFF as N channels, if these are not three" if key else ""
    for kind, files in notes.items():
        count = len(files)
        name, number = next(iter(files.items()))
        yield {
            "pages": f"{count} images have several pages or frames, and only the first is read: export each as an "
            f"image, or three as RGB{as_channels} (such as {readable(name)}, {number})",
            "channels": f"images have {number} channels, of which one besides gray or red, green and blue varies (such "
            f"as alpha or infrared), and are read as RGB: give {key}={number} to train on all of them, or export the "
            f"images as RGB ({count} of those looked at, such as {readable(name)})",
            "turned": f"{count} images with labels are turned by their EXIF orientation (such as {readable(name)}): "
            f"their labels must be as viewers show them, which sizes do not tell: look at some with "
            f"scripts.browse_data",
        }[kind]


def first_lines(messages: Sequence[str]) -> list[str]:
    """The first messages and the number of others; an ending that the messages share is written once, last."""
    shown = messages[:_SHOWN]
    ending = ""
    if len(shown) > 1:
        reversed_ending = os.path.commonprefix([message[::-1] for message in shown])
        ending = reversed_ending[::-1].partition(". ")[2]  # whole sentences
    lines = [message.removesuffix(ending).rstrip() for message in shown]
    if len(messages) > _SHOWN:
        lines.append(f"… and {len(messages) - _SHOWN} more")
    if ending:
        lines.append(ending)
    return lines


def map_images(dataset: Split, look: Callable[[int], Any], workers: int | None, progress: Progress) -> Iterator[Any]:
    """`look(index)` for every image. TimeoutError names the image that, with its label, was not read in time."""
    done = 0
    try:
        for done, answer in enumerate(map_in_order(look, range(len(dataset)), workers), start=1):
            yield answer
            if progress is not None:
                progress(done, len(dataset))
    except TimeoutError as error:
        raise TimeoutError(f"{readable(dataset.path(done))}: {error}") from error


@dataclass
class _Seen:
    """What `_look_at` has found in an image and its label."""

    path: Path  # of the image
    problems: list[Problem] = field(default_factory=list)
    digest: int = 0  # of the image file
    used: Use | None = None
    notes: dict[str, int] = field(default_factory=dict)  # by kind, its pages or channels, or 1: see `notes_as_remarks`
    size: tuple[int, int] | None = None  # of the image
    pixels: np.ndarray | None = None  # of each raw value of the label, int64 (256,)
    palette: Any = None  # the label's file and {id: RGB} of the ids that it holds; None if palettes do not matter

    @contextmanager
    def noting_problems(self, kind: str) -> Iterator[None]:
        """Context that notes an error as a problem: of this `kind`, unless the error says which."""
        try:
            yield
        except ValueError as error:
            self.problems.append(Problem("unknown ids" if isinstance(error, UnknownIds) else kind, str(error)))
        except Exception as error:  # it must not stop the check of the other files
            message = f"{readable(self.path)}: {type(error).__name__}: {error}"
            self.problems.append(Problem("unexpected error", message))


def _look_at(dataset: Split, decode: bool, index: int) -> _Seen:
    """Read an image and its label; `inspect` puts together what was found."""
    seen = _Seen(dataset.path(index))
    if isinstance(dataset, SegmentationDataset) and not dataset.has_files:
        with seen.noting_problems(_UNREADABLE):
            _note_sample(dataset, index, seen)
        return seen
    file = None
    with seen.noting_problems(_UNREADABLE), restorable():
        file = read(seen.path, dataset.turned)
        _note_image(dataset, decode, index, file, seen)
    if isinstance(dataset, SegmentationDataset):
        with seen.noting_problems("unreadable label"):
            _note_label(dataset, index, file, seen)
    return seen


def _note_image(dataset: Split, decode: bool, index: int, file: Stored, seen: _Seen) -> None:
    """Note what an image holds. Levels and channels: with `decode`, or of one of the images decoded for them."""
    channels = dataset.channels
    content = seen.path.read_bytes() if file.format == "array" else file.data  # of an array, perhaps the beginning
    seen.digest = digest(content)
    page_count = file.pages_if_one_is_read(channels)
    if page_count > 1:
        seen.notes["pages"] = page_count
    is_level_sample = is_decoded(index, len(dataset))
    is_looked_at = decode or is_level_sample
    has_equal_colours = channels == 1 and file.channels == COLOURS  # as three channels that are read as one must
    if is_looked_at or has_equal_colours or isinstance(dataset, ClassificationDataset):
        values = decode_values(file, turned=dataset.turned, channels=channels)
        seen.size = (values.shape[1], values.shape[0])
        if is_level_sample or (decode and values.dtype == np.uint16):
            seen.used = use_of(values, dataset.range16)
    else:
        seen.size = image_size(file, dataset.turned, channels)
    if is_looked_at and dataset.channels_key is not None and channels == COLOURS and page_count == 1:
        channel_count = further_channels(file)
        if channel_count:
            seen.notes["channels"] = channel_count


def _note_label(dataset: SegmentationDataset, index: int, file: Stored | None, seen: _Seen) -> None:
    """Note what a label holds. `file`: the image's, whose size is compared; None if it cannot be read."""
    entry = dataset.files[index]
    if entry.label is None:
        return
    label = dataset.raw_label(index)
    seen.pixels = np.bincount(label.reshape(-1), minlength=256)
    if dataset.palette_fix or dataset.table.label_palette:
        colours = label_palette(read(entry.label, photograph=dataset.turned))
        ids = np.flatnonzero(seen.pixels).tolist()
        seen.palette = entry.label, {number: colours[number] for number in ids if number in colours}
    if file is None or seen.size is None:
        return
    width, height = seen.size
    if dataset.turned and file.orientation != 1:
        swaps_different_sides = file.orientation in SWAPS_SIDES and width != height
        if not swaps_different_sides:  # otherwise the label's size tells whether it is turned, too
            seen.notes["turned"] = 1
    with seen.noting_problems("sizes differ"):
        dataset.check_size(entry, seen.size, label.shape[::-1])


def _note_sample(dataset: SegmentationDataset, index: int, seen: _Seen) -> None:
    """Note what a sample holds that a dataset makes itself. ValueError: see `SegmentationDataset.sample`."""
    image, label, _ = dataset.sample(index)
    seen.digest = digest(np.ascontiguousarray(image))
    seen.size = (image.shape[1], image.shape[0])
    if label is not None:
        seen.pixels = np.zeros(256, np.int64)
        seen.pixels[[*dataset.label_ids]] = np.bincount(label.reshape(-1), minlength=256)[: len(dataset.classes)]
