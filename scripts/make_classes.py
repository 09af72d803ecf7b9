"""Write classes.json for your own images, from their labels, and lists of them for training and validation:

    python -m scripts.make_classes data.root=DIR
    python -m scripts.make_classes data.root=DIR ignored=0 overwrite=true    # 0 is void, and 255 a class
    python -m scripts.make_classes data.root=DIR data.label_folder=masks data.label_suffix=_mask
    python -m scripts.make_classes data.root=DIR split=[0.7,0.15,0.15]    # train.txt, val.txt and test.txt
    python -m scripts.make_classes data.root=DIR folds=5 'group=^(.*)_'    # fold0/train.txt, …; sources stay together
    python -m scripts.make_classes data.root=DIR folds=5 'group=^(.*)_' add=true    # images labelled since

Reads all labels below DIR that have an image, and says which images lack labels or differ from them in size. Classes
are the ids up to the largest, or the colours of RGB labels and of black-and-white masks; RGB labels whose channels are
equal and small hold ids, unless gray=colours. `ignored` is not a class, nor are ids below the largest that never occur.
Palettes give ids their colours. The classes are called class_0, class_1, …: rename them in the file before you train.
Prints the number of pixels of every id, which reveals strays, and whatever looks odd.

With split or folds the images in DIR/images are divided at random, so that each list shows every class about as often;
the table says how many images of a list hold each class. A classes.json that is there stays, and so do all lists.
add=true, with the same split or folds and group, appends labelled images that are on no list, in the lists' proportions
and never to test.txt; images of one source stay together.
"""

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from datasets import reading_errors
from datasets.class_list import CLASSES, TRAINED, lookalikes
from datasets.class_table import Palettes, ranges_text
from datasets.file_list import readable
from datasets.folder import WITHHELD, LabelFiles, check_whole, folder_labels, palette_fix
from datasets.label_names import LabelNames
from datasets.layout import about_unlisted, first_of, in_other_capitals, read_json
from datasets.levels import Use, doubts_of_levels, is_decoded, use_of
from datasets.reading import decode_mask, decode_values, image_size, label_palette
from datasets.segmentation import restorable
from datasets.splitting import divide_images, parts_of, source_prefixes, sources_of, unlisted_names
from datasets.stored import read
from datasets.verify import map_images
from datasets.workers import map_in_order
from engine import assemble
from engine.assemble.contracts import builder
from engine.configuration.command_line import configured
from engine.process.console import counted, make_console, progress_bar, table_of, tracked
from engine.process.output_files import writable_file, write_file
from engine.schema.data import FolderData
from engine.schema.keys import MOST_WORKERS, group, key
from scripts.verify_data import class_table

WHITE = 255
RECORDED = "as scripts.make_classes wrote the lists beside this file"
BITS, GRAY, COLOURS, IDS = "single bits", "ids in three equal channels", "colours", "ids"  # kinds of labels

USED = ("root", "palettes", "image_folder", "label_folder", "label_suffix", "range16", "timeout_seconds")


@dataclass
class MakeClasses:
    data: FolderData = group(USED)
    ignored: int | None = key(255, least=0, most=255)  # the id that is not a class and does not count; null: none
    # What RGB labels with three equal channels hold; null: ids if the levels are small or have few gaps, else colours.
    gray: str | None = key(None, one_of=("ids", "colours"))
    overwrite: bool = False  # replace a classes.json that is there, with the names in it; lists stay
    workers: int | None = key(None, least=0, most=MOST_WORKERS)  # processes; null: one per core
    # Shares of train.txt, val.txt and, if there is a third, test.txt; null: no such lists.
    split: list[float] | None = key(None, above=0, most=1)
    folds: int | None = key(None, least=2)  # lists for cross-validation with data.fold=K; null: none
    # Images stay together if this regular expression's first group matches the same text in their names.
    group: str | None = None
    seed: int = key(0, least=0)  # other seeds give other lists
    # Add labelled images that are on no list to the lists that are there; needs the split or folds, and the group, that
    # wrote them.
    add: bool = False

    def parts(self) -> dict[str, float]:
        """{name: share} of the parts that images are divided into: the splits, or the folds."""
        if self.folds is not None:
            return {f"fold{number}": 1 / self.folds for number in range(self.folds)}
        return dict(zip(("train", "val", WITHHELD), self.split or (), strict=False))

    def lists(self) -> dict[str, tuple[str, bool]]:
        """{name: (part, whether the list holds this part, or all others)}"""
        ends = {"": True} if self.folds is None else {"/train": False, "/val": True}
        return {f"{part}{end}": (part, holds_part) for part in self.parts() for end, holds_part in ends.items()}

    @property
    def record_name(self) -> str:
        """The file beside the lists that says how they were written."""
        return "split.json" if self.folds is None else "folds.json"

    def record(self) -> dict[str, Any]:
        """What must be the same where images are added."""
        if self.folds is None:
            return {"split": self.split, "group": self.group}
        return {"folds": self.folds, "group": self.group}

    def check(self) -> None:
        shares = self.split
        if shares is not None and (len(shares) not in (2, 3) or not math.isclose(sum(shares), 1)):
            example = f"[{shares[0]:g},{1 - shares[0]:g}]" if len(shares) == 1 and shares[0] < 1 else "[0.7,0.15,0.15]"
            raise ValueError(f"split={shares}: expected two or three shares that add up to 1, such as {example}")
        if shares is not None and self.folds is not None:
            raise ValueError(f"split={shares} and folds={self.folds}: give one of them")
        if self.add and not self.parts():
            raise ValueError("add=true needs the split or folds, and the group, that wrote the lists")
        if self.group is not None and not self.parts():
            raise ValueError(f"group={self.group} needs split or folds, such as folds=5")
        if self.group is not None and not has_group(self.group):
            raise ValueError(f"group={self.group}: expected a regular expression with a group, such as '^(.*)_'")


def has_group(pattern: str) -> bool:
    """Whether a text is a regular expression that has a group."""
    try:
        return re.compile(pattern).groups > 0
    except re.error:
        return False


@dataclass
class LabelCounts:
    """What the labels hold: for each kind, the pixels of every id or 0xRRGGBB, and the labels that hold it."""

    pixels: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    labels: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    colours: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of ids with a palette, and of colours
    palettes: Palettes = field(default_factory=Palettes)
    other_sizes: list[str] = field(default_factory=list)  # than their images have
    used: list[Use] = field(default_factory=list)  # by 16-bit images, and some of 8 bits

    def recast(self, kind: str, new_kind: str, convert: Callable[[int], int]) -> None:
        """Count ids or colours of one kind as another, which `convert` gives for each."""
        for counters in (self.pixels, self.labels):
            for number, count in counters.pop(kind, Counter()).items():
                counters[new_kind][convert(number)] += count


def make_classes(config: MakeClasses) -> Path:
    """Write the file, and lists if asked, and return the file; print what they hold, see `write_classes`.

    ValueError: the file or a list exists, labels cannot be read or are not all of one kind, the number of classes is
    wrong, or there are fewer sources than lists.
    """
    with assemble.root_named(config.data):
        options = LabelNames(config.data.label_folder, config.data.label_suffix, "data.", config.data.image_folder)
        check_whole(config.data.root, options)
        labels = folder_labels(config.data.root, options, config.data.channels)
        root = Path(str(config.data.root))
        check_record(config, root)
        lists = config.lists()
        sources = sources_of(root, labels, lists, len(config.parts()), config.group, config.add) if lists else {}
        listed = parts_of(root, labels, lists, sources) if config.add else {}
    console = make_console()
    file = root / CLASSES
    is_there = os.path.lexists(file)  # also a dangling link
    if is_there and not config.overwrite and not sources:
        raise ValueError(
            f"data.root={config.data.root}: {file} is there already; overwrite=true replaces it, and the names in it"
        )
    if not is_there or config.overwrite:
        write_classes(config, file, labels, console)
    if sources and not sources.keys() <= listed.keys():
        write_lists(config, root, sources, listed, console)
    elif config.add:
        console.print("every labelled image that may be on these lists is there: they stay as they are")
    still_unlisted = unlisted_names(root, labels) if config.add else []
    if still_unlisted:
        problem = f"{len(still_unlisted)} images are still on no list, such as {first_of(still_unlisted[:1])}"
        reason = f"{WITHHELD}.txt, which never grows, has images of their source"
        console.print(f"{problem}: {reason}", soft_wrap=True)
    return file


def check_record(config: MakeClasses, root: Path) -> None:
    """ValueError if lists cannot be recorded, or to `add`, if others wrote them than this split or folds and group."""
    file = root / config.record_name
    if not config.add:
        if config.parts():
            writable_file("data.root", file, kind="lists")
        return
    record = config.record()
    try:
        old_record = {**read_json(file)}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"add=true: {file}, which says how the lists were made, cannot be read ({error}); if they are as this "
            f"command makes them, write {json.dumps(record)} there"
        ) from None
    changed = [name for name in record if record[name] != old_record.get(name)]
    if changed:
        options = " ".join(f"{name}={json.dumps(old_record.get(name))}" for name in changed)
        raise ValueError(f"add=true: {file} says that the lists were written with {options}: give the same")


def write_classes(config: MakeClasses, file: Path, labels: LabelFiles, console: Console) -> None:
    """Write classes.json; print each id's pixels, how many labels hold it, and what looks odd."""
    root = f"data.root={config.data.root}"
    label_counts = read_labels(config, labels.images, console)
    if label_counts.palettes.conflict is not None and config.data.palettes != "any":
        raise ValueError(f"{root}: {label_counts.palettes.conflict}. {palette_fix('data.')}")
    void = [] if config.ignored is None else [config.ignored]
    notes = notes_on_files(labels, label_counts.other_sizes)
    notes += about_unlisted(unlisted_names(file.parent, labels))
    notes += filter(None, [label_counts.palettes.about_grays()])
    notes += settle_kind(label_counts, void, config.gray)
    if len(label_counts.pixels) > 1:
        raise ValueError(f"{root}: some labels hold {', others '.join(sorted(label_counts.pixels))}; expected one kind")
    ((kind, pixels),) = label_counts.pixels.items()
    if kind == COLOURS:  # each gets an id, and none is ignored
        values_of = dict(enumerate(sorted(pixels)))
        ignored = []
    else:
        values_of = {number: number for number in sorted(pixels)}
        ignored = void
    if len(values_of) <= 256:
        console.print(id_table(label_counts, values_of, ignored, len(labels.images)))
    ids = {number: label_counts.colours.get(value) for number, value in values_of.items() if number not in ignored}
    check_class_count(root, len(ids), ignored)
    notes += doubts_about_classes(pixels, ids, ignored)
    notes += doubts_of_levels(label_counts.used, config.data.range16, "images", keys="data.")
    for note in notes:
        console.print(note, soft_wrap=True)
    write_file(file, classes_text(ids, ignored))
    console.print(f"{len(ids)} classes; now name the classes in {file}", soft_wrap=True)


def notes_on_files(labels: LabelFiles, other_sizes: list[str]) -> list[str]:
    """Notes on labels and images without a partner, and on labels of another size than their image."""
    files_by_note: dict[str, Sequence[object]] = {
        f"left out {len(labels.unpaired)} labels without an image": labels.unpaired,
        f"{len(labels.unlabelled)} images have no label, so no training takes them": labels.unlabelled,
        f"{len(other_sizes)} labels are of another size than their image": other_sizes,
    }
    notes = [f"{note}: {first_of([*map(str, files)])}" for note, files in files_by_note.items() if files]
    unlabelled = [path.stem for path in labels.unlabelled]
    return [*notes, *in_other_capitals(unlabelled, [path.stem for path in labels.unpaired])]


def id_table(counts: LabelCounts, values_of: Mapping[int, int], ignored: list[int], label_count: int) -> Table:
    """Of each id: its colour, its pixels, and how many labels hold it. `values_of`: {id: value in the labels}."""
    (pixels,) = counts.pixels.values()
    (labels,) = counts.labels.values()
    names = [
        f"{number} ignored" if number in ignored else f"{number} {counts.colours.get(value, '')}"
        for number, value in values_of.items()
    ]
    values = values_of.values()
    title = f"ids in the labels ({label_count})"
    return class_table(title, names, [pixels[value] for value in values], [labels[value] for value in values])


def write_lists(
    config: MakeClasses, root: Path, sources: Mapping[str, str], listed: Mapping[str, str], console: Console
) -> None:
    """Write the lists of images, {name: source}; print how many images of each part hold each class, and its pixels.

    `listed`: the parts of images that are on the lists; one without a part, "", stays where it is.
    """
    parts = config.parts()
    if config.add:
        parts.pop(WITHHELD, None)
    names = [name for name in sources if listed.get(name) != ""]
    classes, pixels = pixels_by_class(config, root, names, console)
    numbers = {part: number for number, part in enumerate(parts)}
    old_parts = np.array([numbers.get(listed.get(name, ""), -1) for name in names])
    part_of = divide_images(pixels, [sources[name] for name in names], [*parts.values()], config.seed, old_parts)
    test_list = root / f"{WITHHELD}.txt"
    if os.path.lexists(test_list):
        console.print(f"the images on {test_list} are left out", soft_wrap=True)
    of_folds = ", in val.txt of each fold" if config.folds is not None else ""
    title = f"images that hold a class (share of the pixels){of_folds}"
    console.print(table_of(["", *parts], rows_by_class(classes, pixels, part_of, len(parts)), title))
    if config.group is None and not config.add:
        print_possible_sources(names, len(parts), console)
    lists = {stem: choice for stem, choice in config.lists().items() if choice[0] in parts}
    for stem, (part, holds_part) in lists.items():
        is_on_list = (part_of == numbers[part]) == holds_part
        new_names = [name for name, is_on in zip(names, is_on_list, strict=True) if is_on and name not in listed]
        write_list(root / f"{stem}.txt", new_names, config.add)
    verb = f"added {sum(name not in listed for name in names)} images to" if config.add else "wrote"
    console.print(f"{verb} {', '.join(f'{stem}.txt' for stem in lists)} in {root}", soft_wrap=True)
    if not config.add:
        record = {"about": RECORDED, **config.record(), "seed": config.seed}
        write_file(root / config.record_name, json.dumps(record, indent=1) + "\n")


def print_possible_sources(names: Sequence[str], part_count: int, console: Console) -> None:
    """Print the group that keeps images with the same beginning together, if these may be of one source."""
    group, beginnings = source_prefixes(names, part_count)
    if group:
        advice = f"remove the lists and add 'group={group}', which keeps them together"
        same = f"{len(beginnings)} beginnings before a number, such as {readable(min(beginnings))}"
        console.print(f"names have {same}: if images with the same one are of one source, {advice}", soft_wrap=True)


def rows_by_class(classes: Sequence[str], pixels: np.ndarray, part_of: np.ndarray, part_count: int) -> list[list[str]]:
    """Rows for all images and for each class: the images of each part, and the class's share of its pixels.

    `pixels`: (images, classes); `part_of`: the number of each image's part.
    """
    in_parts = [part_of == number for number in range(part_count)]
    rows = [["images", *map(str, np.bincount(part_of))]]
    for name, counts in zip(classes, pixels.T, strict=True):
        cells = []
        for is_in_part in in_parts:
            share = counts[is_in_part].sum() / max(pixels[is_in_part].sum(), 1)
            cells.append(f"{np.count_nonzero(counts[is_in_part])} ({share:.1%})")
        rows.append([name, *cells])
    return rows


def write_list(file: Path, names: Sequence[str], add: bool) -> None:
    """Write a list of names, or add them to its end."""
    content = file.read_bytes() if add else b""
    if content and not content.endswith(b"\n"):
        content += b"\n"
    write_file(file, content + "".join(f"{name}\n" for name in names).encode())


def pixels_by_class(
    config: MakeClasses, root: Path, names: Sequence[str], console: Console
) -> tuple[Sequence[str], np.ndarray]:
    """The classes, and their pixels in the label of each image, (images, classes)."""
    data = replace(config.data, fold=None)
    with (
        reading_errors(data.timeout_seconds, keys="data.", workers_key="workers"),
        counted(console, "counting") as progress,
    ):
        images = builder("data", data)(root, split="", listed=names)
        count = lambda number: np.bincount(images.read_label(number).ravel(), minlength=256)  # noqa: E731
        pixels = np.stack([*map_images(images, count, config.workers, progress)])
        return images.classes, pixels[:, : len(images.classes)]


def read_labels(config: MakeClasses, images: Mapping[Path, Path | None], console: Console) -> LabelCounts:
    """Read labels, {file: its image}."""
    counts = LabelCounts()
    pairs = [*images.items()]

    def content_of(number: int) -> Contents:
        return contents(*pairs[number], config.data.channels, is_decoded(number, len(pairs)))

    timeout = config.data.timeout_seconds
    with reading_errors(timeout, keys="data.", workers_key="workers"), progress_bar(console) as progress:
        read_contents = map_in_order(content_of, range(len(pairs)), config.workers)
        for (label, _), content in zip(tracked(progress, pairs, "reading labels"), read_contents, strict=True):
            counts.pixels[content.kind].update(content.pixels)
            counts.labels[content.kind].update(content.pixels.keys())
            counts.palettes.add(label, content.colours)
            counts.colours = content.colours | counts.colours
            counts.other_sizes += filter(None, [content.other_size])
            counts.used += filter(None, [content.used])
    return counts


def settle_kind(counts: LabelCounts, ignored: list[int], gray: str | None) -> list[str]:
    """Count gray values as ids or as colours, in place: as `gray` says, else as they look. Returns notes about it.

    ValueError: `gray` is given, but no label has gray values in RGB.
    """
    notes = []
    levels = {code & WHITE for code in counts.pixels.get(GRAY, ())}
    if levels:
        between = levels - {*ignored, WHITE}  # 255 beside small ids marks pixels without a class
        look_like_ids = IDS in counts.pixels or (any(between) and not has_large_gaps(between))
        are_ids = look_like_ids and COLOURS not in counts.pixels
        reading, alternative = ("ids", "colours") if are_ids else ("colours", "ids")
        if gray is None and COLOURS not in counts.pixels:
            hint = f"with gray={alternative} as {alternative}"
            notes = [f"labels in RGB have three equal channels: they are read as {reading}, {hint}"]
        if (gray or reading) == "colours":
            counts.recast(GRAY, COLOURS, lambda code: code)
        else:
            counts.recast(GRAY, IDS, lambda code: code & WHITE)
            counts.colours = {}
    elif gray is not None:
        raise ValueError(f"gray={gray}: no label is in RGB with three equal channels; leave it out")
    are_plain_ids = {*counts.pixels} == {IDS} and not counts.colours  # without palettes
    if gray is None and are_plain_ids and {*counts.pixels[IDS]} == {0, WHITE}:  # masks in black and white
        counts.recast(IDS, COLOURS, lambda level: 0x010101 * level)
        counts.colours = {code: (code & WHITE,) * 3 for code in counts.pixels[COLOURS]}
    return notes


def has_large_gaps(ids: Set[int]) -> bool:
    """Whether the largest id is high and far more ids below it are missing than present."""
    return max(ids) >= 64 and max(ids) + 1 > len(ids) + max(8, 3 * len(ids))


def check_class_count(root: str, class_count: int, ignored: list[int]) -> None:
    """ValueError if so many classes cannot be trained."""
    if class_count not in TRAINED:
        without = f", not counting {', '.join(map(str, ignored))}, which is ignored" if ignored else ""
        many = ". Smoothed (antialiased) edges and JPEG make values of their own: export as PNG, without them"
        raise ValueError(
            f"{root}: the number of classes in the labels is {class_count}{without}; expected {TRAINED[0]} to "
            f"{TRAINED[-1]}{many if class_count > TRAINED[-1] else ''}"
        )


def doubts_about_classes(
    pixels: Counter[int], ids: Mapping[int, Sequence[int] | None], ignored: list[int]
) -> Iterator[str]:
    """What may be wrong with the classes."""
    unseen = [number for number in range(max(ids)) if number not in ids and number not in ignored]
    if unseen:
        yield f"ids that occur nowhere, and are ignored: {ranges_text(unseen)}"
    left_out = {number: pixels[number] for number in ignored if pixels[number]}
    share = sum(left_out.values()) / pixels.total()
    may_be_white = WHITE in left_out and has_large_gaps(ids.keys())  # of levels of gray, such as 0, 127 and 255
    if share > 0.5 or may_be_white:
        yield (
            f"{share:.0%} of the pixels have the ignored id {ranges_text(left_out)}: "
            f"if it is a class, give ignored=null"
        )
    similar = sorted(lookalikes({number: colour for number, colour in ids.items() if colour}))
    if similar:
        yield f"the colours of the classes {ranges_text(similar)} can hardly be told apart: pictures show others"


def classes_text(ids: dict[int, tuple[int, ...] | None], ignored: list[int]) -> str:
    """The file's text: the ids with their colours, except colours that several ids share. `ignored` are called void."""
    several = [colour for colour, count in Counter(ids.values()).items() if count > 1]
    colours = {number: colour for number, colour in ids.items() if colour and colour not in several}
    classes = [
        {"name": "void" if number in ignored else f"class_{number}"}
        | ({"colour": colours[number]} if number in colours else {})
        for number in range(max(ids) + 1)
    ]
    untrained = sorted({*range(len(classes)), *ignored} - {*ids})
    lines = ",\n".join(map(json.dumps, classes))
    return f'{{"classes": [\n{lines}\n],\n"ignored": {untrained}}}\n'


class Contents(NamedTuple):
    """A label's kind; {id or 0xRRGGBB: pixels}; the colours of some; its and its image's size, if these differ;
    and what 16-bit images and some others use, see `datasets.levels`."""

    kind: str
    pixels: dict[int, int]
    colours: dict[int, tuple[int, ...]]
    other_size: str | None
    used: Use | None


@restorable("Labels are PNGs or TIFFs of mode L or P, or RGB: export them again as PNG from your labelling tool.")
def contents(path: Path, image: Path | None, channels: int, shallow: bool) -> Contents:
    """Read a label, and its image if it has one. `shallow`: note what it uses even if it has 8 bits."""
    file = read(path, photograph=True)
    raw = decode_mask(file)
    values, counts = np.unique(raw, return_counts=True)
    pixels = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if raw.dtype == np.int32:
        kind = GRAY if all(code == 0x010101 * (code & WHITE) for code in pixels) else COLOURS
        colours = {code: tuple(code.to_bytes(3, "big")) for code in pixels}
    else:
        palette = label_palette(file)
        kind = BITS if file.png_kind is not None and file.png_kind[0] == 1 and not palette else IDS
        colours = {number: palette[number] for number in pixels if number in palette}
    other_size = None
    levels_use = None
    with suppress(ValueError):  # a damaged image, which a training reports
        if image is not None:
            stored = read(image, True)
            size = image_size(stored, True, channels)
            if raw.shape[::-1] != size:
                other_size = f"{readable(path)} ({raw.shape[1]}x{raw.shape[0]}, {size[0]}x{size[1]})"
            if shallow or stored.may_have_16_bits:
                values = decode_values(stored, channels=channels)
                levels_use = use_of(values) if shallow or values.dtype == np.uint16 else None
    return Contents(kind, pixels, colours, other_size, levels_use)


main = configured("make_classes", MakeClasses)(make_classes)

if __name__ == "__main__":
    main()
