"""Write classes.json for your own images, from what their labels hold:

    python -m scripts.make_classes data.root=DIR

Reads all labels below DIR. Classes are the ids up to the largest, or the colours of RGB labels; 255 is ignored, and so
are ids below the largest that occur nowhere. Palettes give ids their colours. The classes are called class_0, class_1,
…: change their names in the file before you train.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from PIL import Image

from datasets import reading_errors
from datasets.folder import CLASSES, colour_codes, folder_labels
from datasets.reading import decode_label, read
from datasets.segmentation import restorable
from datasets.workers import in_order
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import make_console
from engine.schema.data import FolderData
from engine.schema.keys import group, key

IGNORED, MOST = 255, 253


@dataclass
class MakeClasses:
    data: FolderData = group({"folder": FolderData})  # only root and timeout_seconds matter
    workers: int | None = key(None, least=0)  # processes; null: one per core


def make_classes(values: DictConfig) -> Path:
    """Write the file and return it. ValueError: it is there, or labels cannot be read or are not all of one kind."""
    config = configuration.typed(values, MakeClasses)
    labels, root = folder_labels(config.data.root), f"data.root={config.data.root}"
    file = Path(str(config.data.root)).expanduser() / CLASSES
    if file.exists():
        raise ValueError(f"{root}: {file} is there already; to make it again, move it away")
    ids: dict[int, tuple | None] = {}
    codes: dict[int, tuple | None] = {}
    with reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"):
        for is_rgb, found in in_order(lambda number: contents(labels[number]), range(len(labels)), config.workers):
            (codes if is_rgb else ids).update(found)
    if ids and codes:
        raise ValueError(f"{root}: some labels hold ids, others colours; expected one kind")
    ids = dict(enumerate(codes[code] for code in sorted(codes))) or ids
    ids.pop(IGNORED, None)
    if not 0 < len(ids) <= MOST:
        raise ValueError(f"{root}: {len(ids)} different values in the labels; expected 1 to {MOST} classes")
    colours = [*ids.values()]
    classes = [
        {"name": f"class_{number}"} | ({"colour": ids[number]} if colours.count(ids.get(number)) == 1 else {})
        for number in range(max(ids) + 1)
    ]
    ignored = [number for number in range(len(classes)) if number not in ids] + [IGNORED]
    entries = ",\n".join(map(json.dumps, classes))
    file.write_text(f'{{"classes": [\n{entries}\n],\n"ignored": {ignored}}}\n')
    make_console().print(f"{len(ids)} classes in {len(labels)} labels: {file}", soft_wrap=True, markup=False)
    return file


@restorable("Labels are 8-bit PNGs of mode L or P, or RGB.")
def contents(path: Path) -> tuple[bool, dict[int, tuple | None]]:
    """Whether a label is RGB, and {id: colour in its palette, if it has one}, or {0xRRGGBB: colour}."""
    file = read(path)
    codes = colour_codes(file)
    if codes is not None:
        return True, {code: tuple(code.to_bytes(3, "big")) for code in np.unique(codes).tolist()}
    ids = np.unique(decode_label(file)).tolist()
    palette = Image.open(path, formats=["PNG"]).getpalette() or []
    return False, {number: tuple(palette[3 * number : 3 * number + 3]) or None for number in ids}


@configured("make_classes", MakeClasses)
def main(values: DictConfig) -> None:
    make_classes(values)


if __name__ == "__main__":
    main()
