"""Write classes.json for your own images, from their labels:

    python -m scripts.make_classes data.root=DIR
    python -m scripts.make_classes data.root=DIR workers=8
    python -m scripts.make_classes data.root=DIR data.timeout_seconds=3600    # a slow disk

Reads all labels below DIR. Classes are the ids up to the largest, or the colours of RGB labels and of masks in
black and white. The id 255 is ignored, and so are ids below the largest that occur nowhere. Palettes give ids their
colours. The classes are called class_0, class_1, …: change their names in the file before you train. Prints the pixels
of every id, which show strays.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from datasets import reading_errors
from datasets.class_table import Palettes
from datasets.folder import CLASSES, TRAINED, folder_labels
from datasets.reading import decode_mask, label_palette, read
from datasets.segmentation import restorable
from datasets.workers import in_order
from engine import assemble
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import make_console, progress_bar, tracked
from engine.output_files import write_file
from engine.schema.data import FolderData
from engine.schema.keys import MOST_WORKERS, group, key
from scripts.verify_data import class_table

IGNORED = 255


@dataclass
class MakeClasses:
    data: FolderData = group({"folder": FolderData})  # only root and timeout_seconds matter
    workers: int | None = key(None, least=0, most=MOST_WORKERS)  # processes; null: one per core


def make_classes(values: DictConfig) -> Path:
    """Write the file and return it; print the pixels of every id, and how many labels hold it.

    ValueError: the file is there, labels cannot be read or are not all of one kind, or the number of classes is wrong.
    """
    config = configuration.typed(values, MakeClasses)
    with assemble.root_named(config.data):
        labels = folder_labels(config.data.root)
    root = f"data.root={config.data.root}"
    file = Path(str(config.data.root)) / CLASSES
    if os.path.lexists(file):  # also a link to nowhere
        raise ValueError(f"{root}: {file} is there already; to make it again, move it away")
    kinds, palettes, colours = set[str](), Palettes(), dict[int, tuple[int, ...]]()
    pixels, holding = Counter[int](), Counter[int]()
    console = make_console()
    with (
        reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"),
        progress_bar(console) as progress,
    ):
        read_labels = in_order(lambda number: contents(labels[number]), range(len(labels)), config.workers)
        for label, (kind, held, coloured) in zip(tracked(progress, labels, "reading labels"), read_labels, strict=True):
            kinds.add(kind)
            pixels.update(held)
            holding.update(held.keys())
            palettes.add(label, coloured)
            colours = coloured | colours
    if len(kinds) > 1:
        raise ValueError(f"{root}: some labels hold {', others '.join(sorted(kinds))}; expected one kind")
    if palettes.conflict is not None:
        raise ValueError(f"{root}: {palettes.conflict}")
    in_colours = "colours" in kinds
    if not colours and {*pixels} == {0, IGNORED}:  # masks in black and white
        in_colours = True
        pixels, holding = (Counter({0x010101 * level: n for level, n in of.items()}) for of in (pixels, holding))
        colours = {code: (code & 255,) * 3 for code in pixels}
    values_of = dict(enumerate(sorted(pixels))) if in_colours else {number: number for number in sorted(pixels)}
    ignored = None if in_colours else IGNORED
    if len(values_of) <= 256:
        names = [f"{n} ignored" if n == ignored else f"{n} {colours.get(value, '')}" for n, value in values_of.items()]
        counts = (np.array([of[value] for value in values_of.values()]) for of in (pixels, holding))
        console.print(class_table(f"ids in the labels ({len(labels)})", names, *counts))
    ids = {number: colours.get(value) for number, value in values_of.items() if number != ignored}
    smoothed = not in_colours and has_smoothed_edges(pixels)
    if smoothed or len(ids) not in TRAINED:
        without = "" if in_colours else f", not counting {IGNORED}, which is ignored"
        found, expected = ("values", "one per class") if smoothed else ("classes", f"{TRAINED[0]} to {TRAINED[-1]}")
        likely = ". Smoothed (antialiased) edges make values of their own: export the labels without them"
        raise ValueError(
            f"{root}: the number of {found} in the labels is {len(ids)}{without}; expected {expected}"
            f"{likely if smoothed or len(ids) > TRAINED[-1] else ''}"
        )
    write_file(file, written(ids, [] if in_colours else [IGNORED]))
    console.print(f"{len(ids)} classes; now name the classes in {file}", soft_wrap=True)
    return file


def has_smoothed_edges(pixels: Counter[int]) -> bool:
    """Whether masks in black and white seem to have gray edges: many values, with gaps, in few pixels.

    Resizing and JPEG also change pixels far from the edges by a few levels, to values that no class has beside white.
    """
    between = [value for value in pixels if 0 < value < IGNORED]
    if len(between) < 8 or max(between) == len(between):
        return False
    near = 8 if max(between) > IGNORED - 8 else 1  # levels that count as black, or as white
    gray = sum(count for value, count in pixels.items() if near <= value <= IGNORED - near)
    return gray < sum(count for value, count in pixels.items() if value > IGNORED - near)


def written(ids: dict[int, tuple[int, ...] | None], ignored: list[int]) -> str:
    """The file's text: the ids with their colours, except colours that several ids have. `ignored` are no classes."""
    several = [colour for colour, count in Counter(ids.values()).items() if count > 1]
    colours = {number: colour for number, colour in ids.items() if colour and colour not in several}
    classes = [
        {"name": f"class_{number}"} | ({"colour": colours[number]} if number in colours else {})
        for number in range(max(ids) + 1)
    ]
    ignored = [number for number in range(len(classes)) if number not in ids] + ignored
    entries = ",\n".join(map(json.dumps, classes))
    return f'{{"classes": [\n{entries}\n],\n"ignored": {ignored}}}\n'


@restorable("Labels are 8-bit PNGs of mode L or P, or RGB: export them again as PNG from your labelling tool.")
def contents(path: Path) -> tuple[str, dict[int, int], dict[int, tuple[int, ...]]]:
    """A label's kind, "ids", "single bits" or "colours"; {id or 0xRRGGBB: pixels}; and the known colours of these."""
    file = read(path)
    raw = decode_mask(file)
    values, counts = np.unique(raw, return_counts=True)
    pixels = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if raw.dtype == np.int32:
        return "colours", pixels, {code: tuple(code.to_bytes(3, "big")) for code in pixels}
    palette = label_palette(file)
    kind = "single bits" if file.data[24] == 1 and not palette else "ids"
    return kind, pixels, {number: palette[number] for number in pixels if number in palette}


@configured("make_classes", MakeClasses)
def main(values: DictConfig) -> None:
    make_classes(values)


if __name__ == "__main__":
    main()
