"""Drawn street scenes in the Cityscapes layout: a small dataset, written to disk once and then read as Cityscapes."""

import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from datasets.cache import alone_in, require_cache_folder
from datasets.cityscapes import cityscapes
from datasets.class_list import CLASSES
from datasets.row import Row
from datasets.segmentation import SegmentationDataset
from datasets.streets import draw_street

IMAGES = {"train": 200, "val": 40}  # by default

_VERSION = 1  # part of the cache folder's name; increment when the pictures change
_MARKER = "synthetic-streets.json"
_UNDRAWN = ("wall", "rider", "truck", "bus", "train", "motorcycle", "bicycle")
_CITIES = {"train": ("drawnburg", "inkstadt"), "val": ("sketchheim",)}


def synthetic(
    root: str | os.PathLike | None,
    split: str,
    images: tuple[int, int] = (IMAGES["train"], IMAGES["val"]),
    seed: int = 0,
    draw: bool = True,
    own_images: str = "choose the dataset folder",
) -> SegmentationDataset:
    """One split, "train" or "val", of a synthetic Cityscapes: 256x128 pixels, 12 of the 19 classes, and void regions.

    `images`: numbers of (train, val) images. The first call writes the pictures into `root`, which must be new, empty
    or written by this function; the default is the user's cache folder. The pictures depend only on `images` and
    `seed`. `own_images`: advice in messages to users with images of their own.
    ValueError if the split is unknown, `root` holds other files or cannot be written, there are no pictures yet and
    `draw` is False, or images or labels are missing (as in `cityscapes`).
    """
    if split not in _CITIES:
        raise ValueError(f"split {split!r} is unknown to synthetic; expected one of {', '.join(_CITIES)}")
    settings = {"version": _VERSION, "train": images[0], "val": images[1], "seed": seed}
    folder = Path(os.path.expanduser(root)) if root else _folder_in_cache(images, seed)
    if not (folder / _MARKER).is_file():
        if not draw:
            raise ValueError(
                f"the synthetic dataset is not yet in {folder}: a training writes it; for your own images, {own_images}"
            )
        _write_once(folder, settings, own_images, in_cache=not root)
    _check_settings(folder, settings)
    dataset = cityscapes(folder, split)
    return replace(dataset, name="synthetic", table=replace(dataset.table, absent=_UNDRAWN))


def _folder_in_cache(images: tuple[int, int], seed: int) -> Path:
    cache = require_cache_folder("the synthetic dataset", "give data.root=DIR, a new folder")
    return cache / f"synthetic-streets-{_VERSION}" / f"{images[0]}-{images[1]}-{seed}"


def _check_settings(folder: Path, settings: dict) -> None:
    """ValueError unless the pictures in a folder were written with these settings."""
    written_settings = json.loads((folder / _MARKER).read_text())
    if written_settings != settings:
        raise ValueError(
            f"{folder} holds synthetic streets written with {written_settings}, expected {settings}. "
            "Choose another folder, or give none to use the cache folder."
        )


def write_streets(folder: Path, images: dict[str, int], seed: int) -> None:
    """Draw scenes into `folder`, in the Cityscapes layout. `images`: {split: number of scenes}."""
    for split_number, (split, count) in enumerate(images.items()):
        for index in range(count):
            image, label = draw_street(np.random.default_rng([seed, split_number, index]))
            city = _CITIES[split][index % len(_CITIES[split])]
            name = f"{city}_{0:06d}_{index:06d}"
            _write_png(folder / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", image[..., ::-1])
            _write_png(folder / "gtFine" / split / city / f"{name}_gtFine_labelIds.png", label)


def _write_once(folder: Path, settings: dict, own_images: str, in_cache: bool) -> None:
    """Write a temporary folder and rename it: readers never see half a dataset, and one of two writers wins."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        choice = "Choose another folder"
        if any((folder / name).exists() for name in (CLASSES, "images", "train/images")):
            choice = f"If it holds images of your own, {own_images}. {choice}"
        raise ValueError(
            f"{folder} exists and was not written by the synthetic dataset (it has no {_MARKER}); expected a new or "
            f"empty folder. {choice}, or give none to use the cache folder."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            alone_in(folder.parent, f".{folder.name}-") if in_cache else nullcontext(),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary,
        ):
            if (folder / _MARKER).is_file():  # another process has written it in the meantime
                return
            streets = Path(temporary) / "streets"
            write_streets(streets, {split: settings[split] for split in _CITIES}, seed=settings["seed"])
            (streets / _MARKER).write_text(json.dumps(settings))
            try:
                streets.rename(folder)
            except OSError:
                if not (folder / _MARKER).is_file():  # otherwise another process was faster
                    raise
    except OSError as error:
        raise ValueError(
            f"the synthetic dataset cannot be written to {folder} ({error}); expected a writable folder with 20 MB "
            "free. Give another folder."
        ) from error


def _write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = cv2.imencode(".png", pixels)[1]
    path.write_bytes(encoded.tobytes())


SYNTHETIC = Row(synthetic, IMAGES, classes=19, drawn=True)
