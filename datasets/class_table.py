"""How classes are numbered in label files, in training and in official prediction files."""

import colorsys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from datasets.file_list import readable

IGNORED = 255  # the train id of pixels that do not count
_ILLEGAL = 254  # in lookup tables: a raw value that label files must not contain; never leaves this module


class Palettes:
    """Compares the palettes of label files, which may give the same number to different classes.

    An id's first colour is the reference: its colour in `expected`, {id: RGB}, if any, else in the first file that
    holds the id. `conflict` is a message that names the first file with another colour, and the source of the first
    colour; None if there is no such file. `grays`: the gray of each index, in palettes of grays that are not their
    indices; `gray_labels` and `plain_labels`: the numbers of files with such a palette, and without any.
    """

    def __init__(self, expected: Mapping[int, tuple[int, ...]] | None = None) -> None:
        self.conflict: str | None = None
        # By id: where its colour comes from, and the colour.
        source = "the dataset's list of classes"
        self._first = {number: (source, colour) for number, colour in (expected or {}).items()}
        self.grays: dict[int, int] = {}
        self.gray_labels = 0
        self.plain_labels = 0
        self.first_gray: Path | None = None

    def add(self, path: Path, colours: Mapping[int, tuple[int, ...]]) -> None:
        """Compare a file's colours for the ids that it holds."""
        self.plain_labels += not colours
        is_gray = all(number < 256 and len({*colour}) == 1 for number, colour in colours.items())
        levels = {number: colour[0] for number, colour in colours.items()} if is_gray else {}
        if any(number != level for number, level in levels.items()):
            self.grays |= levels
            self.first_gray = self.first_gray or path
            self.gray_labels += 1
        for number, colour in colours.items():
            first, expected = self._first.setdefault(number, (str(path), colour))
            if self.conflict is None and colour != expected:
                self.conflict = (
                    f"{readable(path)}: its palette gives the id {number} the colour {colour}, and {first} the colour "
                    f"{expected}: the same id may mean different classes"
                )

    def about_grays(self, table: "ClassTable | None" = None) -> str:
        """A sentence on palettes of grays; "" if there are none, or if both readings are the same in `table`."""
        if not self.grays:
            return ""
        if table is not None and all(
            table.train_id_of_gray(gray) == table.label_ids.get(number) for number, gray in self.grays.items()
        ):
            return ""
        plain = f" ({self.plain_labels} others have none)" if self.plain_labels else ""
        return (
            f"{self.gray_labels} labels have palettes of grays, such as {readable(self.first_gray)}{plain}: their "
            f"indices {ranges_text(self.grays)} count, not the grays {ranges_text({*self.grays.values()})}; "
            f"if the grays are meant, save gray PNGs without palettes"
        )

    def grays_fit(self, table: "ClassTable") -> bool:
        """Whether the grays of palettes, not their indices, may be the ids that are meant.

        Every gray must be an id. Also, other labels have no palettes, or a gray is a class whose index is ignored.
        """
        gray_ids = [table.train_id_of_gray(gray) for gray in self.grays.values()]
        if None in gray_ids:
            return False
        index_ids = [table.label_ids.get(number, IGNORED) for number in self.grays]
        pairs = zip(gray_ids, index_ids, strict=True)
        return self.plain_labels > 0 or any(index_id == IGNORED and gray_id != IGNORED for gray_id, index_id in pairs)

    def swap_remarks(self, listed: Mapping[int, int]) -> list[str]:
        """A sentence if an id has the colour of another one in a list of classes, {0xRRGGBB: id}."""
        for number, (source, colour) in self._first.items():
            listed_number = listed.get(int.from_bytes(bytes(colour), "big"), number)
            if listed_number != number:
                return [
                    f"{source}: its palette gives the id {number} the colour {colour}, which the list of classes gives "
                    f"the id {listed_number}: check their names there; with palettes=any only ids count"
                ]
        return []


class UnknownIds(ValueError):
    """A label file holds values that are not in the class table."""


@dataclass(frozen=True)
class ClassTable:
    """The classes of a dataset in train-id order, with their numbers in its label and prediction files.

    `names`, `palette` (RGB, 0-255) and `official_ids` have one entry per class. `label_ids` maps every raw value that a
    label file may contain to a train id or to `IGNORED`; any other raw value is an error. `label_colours`,
    {0xRRGGBB: raw value}, is for label files in colours, `label_palette`, {raw value: RGB}, for known palettes.
    `absent`: classes known to be in no image. `ignored`: raw values of classes that are ignored on purpose;
    `ignored_by`: the list that ignores the others. Official prediction files hold `official_void` for ignored pixels,
    and carry the palette if `coloured_predictions` is set.
    """

    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    official_ids: tuple[int, ...]
    label_ids: Mapping[int, int]
    label_colours: Mapping[int, int] = field(default_factory=dict)
    official_void: int = 0
    coloured_predictions: bool = False
    label_palette: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    ignored: tuple[int, ...] = ()
    ignored_by: str = "the dataset's list of classes"
    _to_train: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_official: np.ndarray = field(init=False, repr=False, compare=False)  # (256,) uint8
    _to_colour: np.ndarray = field(init=False, repr=False, compare=False)  # (256, 3) uint8

    def __post_init__(self) -> None:
        count = len(self.names)
        assert count == len(self.palette) == len(self.official_ids) < _ILLEGAL
        assert set(self.label_ids.values()) <= {*range(count), IGNORED}
        to_train = np.full(256, _ILLEGAL, np.uint8)
        for raw, train_id in self.label_ids.items():
            to_train[raw] = train_id
        to_official = np.full(256, self.official_void, np.uint8)
        to_official[:count] = self.official_ids
        to_colour = np.zeros((256, 3), np.uint8)
        to_colour[:count] = self.palette
        for name, array in {"train": to_train, "official": to_official, "colour": to_colour}.items():
            object.__setattr__(self, f"_to_{name}", array)

    def train_ids(self, raw: np.ndarray) -> np.ndarray:
        """Raw label values, uint8 (H, W) -> train ids, uint8 (H, W). Raises UnknownIds for values outside the table."""
        mapped = cv2.LUT(raw, self._to_train)
        if (mapped == _ILLEGAL).any():
            foreign = sorted(set(np.unique(raw).tolist()) - set(self.label_ids))
            ending = f", … ({len(foreign)} in all)" if len(foreign) > 8 else ""
            cure = ""
            if foreign == [len(self.names)] and not (raw == 0).any():
                cure = "; if they count from 1, scripts.make_classes overwrite=true lists them so"
            raise UnknownIds(
                f"contains the ids {', '.join(map(str, foreign[:8]))}{ending}, which are not in the class table; "
                f"expected only {ranges_text(self.label_ids)}{cure}"
            )
        return mapped

    def raw_ids(self, raw: np.ndarray) -> np.ndarray:
        """Raw label values, uint8 (H, W), as they are. Raises UnknownIds for values outside the table."""
        self.train_ids(raw)
        return raw

    def train_id_of_gray(self, gray: int) -> int | None:
        """The train id of a gray level in a label without a palette; None if it has none."""
        return self.label_ids.get(self.id_of_gray(gray))

    def id_of_gray(self, gray: int) -> int:
        """The raw value that a gray level stands for: itself, unless only the colour of a class is this gray."""
        return gray if gray in self.label_ids else self.label_colours.get(0x010101 * gray, gray)

    def by_class(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels of each raw value, int64 (256,) -> pixels of each train id, int64 (256,)."""
        return np.bincount(self._to_train, pixels, minlength=256).astype(np.int64)

    def doubts(self, pixels: np.ndarray, images: str) -> list[str]:
        """What looks wrong in label files. `pixels` of each raw value, int64 (256,); `images`: what shows them."""
        by_class = self.by_class(pixels)
        values = {*np.flatnonzero(pixels).tolist()}
        doubts = []
        ids = [number for number, train_id in self.label_ids.items() if train_id != IGNORED]
        names = [name for number, name in enumerate(self.names) if not by_class[number] and name not in self.absent]
        if values and names:
            hint = ""
            if self._look_like_train_ids(values, ids):
                hint = f". They hold {ranges_text(values)}, which look like train ids; expected {ranges_text(ids)}"
            elif values == {0, IGNORED} and IGNORED not in ids:
                hint = (
                    ". They hold 0 and 255 alone, and 255 is ignored: if these are masks, scripts.make_classes "
                    "overwrite=true writes both as classes"
                )
            doubts.append(f"no {images} shows {', '.join(names)}: check the labels and the classes{hint}")
        ignored = sorted(values - {*ids, *self.ignored})
        share = pixels[ignored].sum() / max(1, int(pixels.sum()))
        if share > 0.5:
            doubts.append(
                f"{share:.0%} of the pixels are ignored by {self.ignored_by}: their ids are {ranges_text(ignored)}"
            )
        return doubts

    def _look_like_train_ids(self, values: Set[int], ids: Sequence[int]) -> bool:
        """Whether raw values, some of them without a class, are most of the train ids, and perhaps void."""
        class_count = len(self.names)
        numbers = values - {IGNORED}
        are_ids = numbers <= {*ids, *self.ignored}
        return not are_ids and max(numbers) <= class_count <= max(ids) and 2 * len(numbers) >= class_count

    def official(self, train_ids: np.ndarray) -> np.ndarray:
        """Train ids, uint8 (H, W) -> ids in official prediction files, uint8 (H, W)."""
        assert train_ids.dtype == np.uint8, f"train ids are uint8, got {train_ids.dtype}"
        return self._to_official[train_ids]

    def colour(self, train_ids: np.ndarray) -> np.ndarray:
        """Train ids, uint8 (H, W) -> RGB uint8 (H, W, 3); ignored pixels are black."""
        assert train_ids.dtype == np.uint8, f"train ids are uint8, got {train_ids.dtype}"
        return self._to_colour[train_ids]


def rgb(values: Sequence[int]) -> tuple[int, int, int]:
    """A colour from a file. Raises ValueError or TypeError unless given three integers from 0 to 255."""
    red, green, blue = values
    for level in values:
        if level not in range(256):
            raise ValueError(f"the colour {list(values)} has the level {level}, expected 0 to 255")
    return int(red), int(green), int(blue)


def distinct_colours(count: int) -> tuple[tuple[int, int, int], ...]:
    """Distinct RGB colours, always the same: hues in golden-ratio steps, in three alternating shades."""
    shades = ((1.0, 1.0), (0.55, 0.9), (0.9, 0.6))  # (saturation, value)
    colours = (colorsys.hsv_to_rgb(index * 0.6180339887 % 1, *shades[index % 3]) for index in range(count))
    return tuple((round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in colours)


def ranges_text(values: Iterable[int]) -> str:
    """The text of integers with runs as ranges: {0, 1, 2, 5} -> "0-2, 5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def check_train_ids(source: str, label: np.ndarray, classes: int) -> None:
    """ValueError: a label holds a train id that is neither a class nor `IGNORED`. `source` begins the message."""
    foreign_ids = np.unique(label[(label >= classes) & (label != IGNORED)])
    if foreign_ids.size:
        raise ValueError(
            f"{source} with the ids {ranges_text(foreign_ids.tolist())}: expected classes from 0 to {classes - 1}, and "
            f"{IGNORED} for pixels that do not count"
        )


def check_form(source: str, array: object, expected: str) -> None:
    """ValueError, which begins with its `source`: an array has another dtype or shape than `form_of` has said."""
    if form_of(array) != expected:
        raise ValueError(f"{source} {form_of(array)}: expected {expected}")


def form_of(array: object) -> str:
    """The dtype and shape of an array, such as "uint8 (64, 64, 3)"; of anything else, its class."""
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
