"""Write classes.json for your own images, from their labels:

    python -m scripts.make_classes data.root=DIR
    python -m scripts.make_classes data.root=DIR workers=8
    python -m scripts.make_classes data.root=DIR data.timeout_seconds=3600    # a slow disk

Reads all labels below DIR. Classes are the ids up to the largest, or the colours of RGB labels; 255 is ignored, and so
are ids below the largest that occur nowhere. Palettes give ids their colours. The classes are called class_0, class_1,
…: change their names in the file before you train. Prints the pixels of every id, which show strays.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from PIL import Image

from datasets import reading_errors
from datasets.folder import CLASSES, TRAINED, colour_codes, folder_labels
from datasets.reading import decode_label, read
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
    kinds, pixels, holding, colours = set[bool](), Counter[int](), Counter[int](), dict[int, tuple[int, ...]]()
    console = make_console()
    with (
        reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"),
        progress_bar(console) as progress,
    ):
        read_labels = in_order(lambda number: contents(labels[number]), range(len(labels)), config.workers)
        for (is_rgb, held, coloured), _ in zip(read_labels, tracked(progress, labels, "reading labels"), strict=True):
            kinds.add(is_rgb)
            pixels.update(held)
            holding.update(held.keys())
            colours |= coloured
    if len(kinds) > 1:
        raise ValueError(f"{root}: some labels hold ids, others colours; expected one kind")
    values_of = dict(enumerate(sorted(pixels))) if True in kinds else {number: number for number in sorted(pixels)}
    if len(values_of) <= 256:
        names = [f"{n} ignored" if n == IGNORED else f"{n} {colours.get(value, '')}" for n, value in values_of.items()]
        counts = (np.array([of[value] for value in values_of.values()]) for of in (pixels, holding))
        console.print(class_table(f"ids in the labels ({len(labels)})", names, *counts))
    ids = {number: colours.get(value) for number, value in values_of.items() if number != IGNORED}
    if len(ids) not in TRAINED:
        raise ValueError(
            f"{root}: the number of classes in the labels is {len(ids)}, not counting {IGNORED}, which is ignored; "
            f"expected {TRAINED[0]} to {TRAINED[-1]}. Masks of 0 and 255 should be written as 0 and 1"
        )
    write_file(file, written(ids))
    console.print(f"{len(ids)} classes; now name the classes in {file}", soft_wrap=True)
    return file


def written(ids: dict[int, tuple[int, ...] | None]) -> str:
    """The file's text: the ids with their colours, except colours that several ids have."""
    several = [colour for colour, count in Counter(ids.values()).items() if count > 1]
    colours = {number: colour for number, colour in ids.items() if colour and colour not in several}
    classes = [
        {"name": f"class_{number}"} | ({"colour": colours[number]} if number in colours else {})
        for number in range(max(ids) + 1)
    ]
    ignored = [number for number in range(len(classes)) if number not in ids] + [IGNORED]
    entries = ",\n".join(map(json.dumps, classes))
    return f'{{"classes": [\n{entries}\n],\n"ignored": {ignored}}}\n'


@restorable("Labels are 8-bit PNGs of mode L or P, or RGB: export them again as PNG from your labelling tool.")
def contents(path: Path) -> tuple[bool, dict[int, int], dict[int, tuple[int, ...]]]:
    """Whether a label is RGB; {id or 0xRRGGBB: pixels}; and the colours of these, for ids from the palette if any."""
    file = read(path)
    codes = colour_codes(file)
    values, counts = np.unique(decode_label(file) if codes is None else codes, return_counts=True)
    pixels = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if codes is not None:
        return True, pixels, {code: tuple(code.to_bytes(3, "big")) for code in pixels}
    palette = Image.open(path, formats=["PNG"]).getpalette() or []
    return False, pixels, {number: tuple(palette[3 * number :][:3]) for number in pixels if 3 * number < len(palette)}


@configured("make_classes", MakeClasses)
def main(values: DictConfig) -> None:
    make_classes(values)


if __name__ == "__main__":
    main()
