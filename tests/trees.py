"""Fake datasets in the exact official layouts, small enough to write for every test."""

import json
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from engine import assemble
from tests.runs import run_config


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, pixels)[1].tobytes())


def write_palette(path: Path, indices: np.ndarray, colours: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(indices)
    image.putpalette([value for colour in colours for value in colour])
    image.save(path)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def pair(index: int, ids: list[int], size: tuple[int, int] = (24, 40)) -> tuple[np.ndarray, np.ndarray]:
    """An image of noise, uint8 (H, W, 3), and a label with pixels of every id, uint8 (H, W)."""
    rng = np.random.default_rng(index)
    ids = np.resize(np.array(ids, np.uint8), size[0] * size[1])
    return rng.integers(0, 256, (*size, 3), dtype=np.uint8), rng.permutation(ids).reshape(size)


def picture(path: Path, size: tuple[int, int] = (40, 60), index: int = 0) -> np.ndarray:
    """Write an image without sharp edges; returns its pixels as OpenCV reads them, BGR."""
    pixels = cv2.GaussianBlur(pair(index, [0], size)[0], (0, 0), 4)
    pixels = cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX)
    write(path, pixels)
    return pixels


def camvid_folders(root: Path, images: str = "{}/images/{}.jpg", labels: str = "{}/labels/{}.png") -> Path:
    """6 training, 2 validation, 2 test images."""
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        for index in range(count):
            image, label = pair(index, list(range(12)))
            write(root / images.format(split, f"0001TP_{index:06d}"), image)
            write(root / labels.format(split, f"0001TP_{index:06d}"), label)
    return root


camvid_annot = partial(camvid_folders, images="{}/{}.png", labels="{}annot/{}.png")


def cityscapes(root: Path) -> Path:
    """The official archives as unpacked, including files that we do not read."""
    cities = {"train": ("aachen", "bochum"), "val": ("frankfurt",), "test": ("berlin",)}
    for split, names in cities.items():
        for city in names:
            for index in range(2):
                image, label = pair(index, list(range(34)))
                stem = f"{city}_{index:06d}_000019"
                write(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", image)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", label)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_color.png", image)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_instanceIds.png", label.astype(np.uint16))
                (root / "gtFine" / split / city / f"{stem}_gtFine_polygons.json").write_text("{}")
    (root / "license.txt").write_text("")
    return root


COCO_SIZES = ((32, 40), (40, 32), (24, 50), (33, 27))  # (height, width): they differ from image to image
COCO_IDS = {"train": (9, 25, 30, 34), "val": (139, 285), "test": (1, 16)}
COCO_CHALLENGE = {"train": (34, 9, 30), "val": (285, 139)}


def coco_stuff(root: Path, pixel_maps: bool = True, stuffthingmaps: bool = True) -> Path:
    """COCO's archives and both label archives, all unpacked into one folder (stuffthingmaps into a subfolder).

    The challenge's pixel maps are palette PNGs of ids; `stuffthingmaps` are grayscale PNGs of id - 1, in which things
    keep their classes. Both labels of an image agree; there are no crowds.
    """
    for split, ids in COCO_IDS.items():
        for index, coco_id in enumerate(ids):
            things_and_stuff = [0, 1, 17, 91, *range(92, 183)]
            image, label = pair(coco_id, things_and_stuff, COCO_SIZES[index])
            write(root / f"{split}2017" / f"{coco_id:012d}.jpg", image)
            name = f"{coco_id:012d}.png"
            if split != "test" and pixel_maps:
                merged = np.where((label > 0) & (label < 92), 183, label).astype(np.uint8)
                colours = [(i, 255 - i, 7) for i in range(256)]
                write_palette(root / "annotations" / f"stuff_{split}2017_pixelmaps" / name, merged, colours)
            if split != "test" and stuffthingmaps:
                write(root / "stuffthingmaps" / f"{split}2017" / name, label - np.uint8(1))  # 0 becomes 255
    for split, ids in COCO_CHALLENGE.items():
        file = root / "annotations" / "deprecated-challenge2017" / f"{split}-ids.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{coco_id}\n" for coco_id in ids))
    return root


VISTAS_SIZES = ((30, 40), (60, 45), (24, 50))
VISTAS_SPLITS = {"training": 3, "validation": 2, "testing": 2}


def vistas_config(labels: int = 66, version: float = 1.1) -> dict:
    """Vistas' config file; its last label is not evaluated. The real file of v1.2 says version 1.1."""
    entries = [
        {"color": [(5 * index) % 256, 255 - index, (index * index) % 256], "instances": index % 2 == 0}
        | {"readable": f"Class {index}", "name": f"object--class-{index}", "evaluate": True}
        for index in range(labels - 1)
    ]
    unlabelled = {"color": [0, 0, 0], "instances": False, "readable": "Unlabeled", "name": "void--unlabeled"}
    header = {"version": version, "mapping": "public", "folder_structure": "{split}/{content}/{key:.{22}}.{ext}"}
    return {"labels": [*entries, {**unlabelled, "evaluate": False}], **header}


def vistas(root: Path, versioned: bool = False) -> Path:
    """v1.2 as in its own archive or (`versioned`) as in the v2.0 archive, beside the labels of v2.0."""
    config = vistas_config()
    colours = [label["color"] for label in config["labels"]]
    for split, count in VISTAS_SPLITS.items():
        for index in range(count):
            image, label = pair(index, list(range(66)), VISTAS_SIZES[index])
            write(root / split / "images" / f"street-{index:015d}.jpg", image)
            if split == "testing":
                continue
            folder = root / split / "v1.2" if versioned else root / split
            write_palette(folder / "labels" / f"street-{index:015d}.png", label, colours)
            number = np.arange(label.size, dtype=np.uint16).reshape(label.shape) % 200
            write(folder / "instances" / f"street-{index:015d}.png", label * np.uint16(256) + number)
            if versioned:
                write(root / split / "v2.0" / "labels" / f"street-{index:015d}.png", label + np.uint8(50))
    (root / ("config_v1.2.json" if versioned else "config.json")).write_text(json.dumps(config))
    if versioned:
        (root / "config_v2.0.json").write_text(json.dumps(vistas_config(124, version=2.0)))
    return root


FOLDER = {
    "classes": [{"name": "wood", "colour": [120, 80, 40]}, {"name": "bark"}, {"name": "rot"}, {"name": "scale"}],
    "ignored": [255, 3],
}


def folder(root: Path) -> Path:
    """Own images in folders, with labels of mode L; the test split has none."""
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        for index in range(count):
            image, label = pair(index, [0, 0, 0, 0, 1, 1, 2, 3, 255])
            name = f"{'ab'[index % 2]}/board.{index}"
            write(root / split / "images" / f"{name}{('.jpg', '.PNG')[index % 2]}", image)
            if split != "test":
                write(root / split / "labels" / f"{name}.png", label)
    (root / "classes.json").write_text(json.dumps(FOLDER))
    return root


def splits_of(kind: str, root: Path) -> list[str]:
    """The splits that a dataset of `SEGMENTATION` has."""
    return [*assemble.official_images(run_config(f"data={kind}", f"data.root={root}").data)]


WITHHELD = ("cityscapes", "coco_stuff", "folder", "vistas")  # these have no labels in their test split
# By the name of the function that reads them.
SEGMENTATION = dict(camvid=camvid_folders, cityscapes=cityscapes, coco_stuff=coco_stuff, folder=folder, vistas=vistas)
