"""Fake data sets in the exact official layouts, small enough to be written for every test."""

from pathlib import Path

import cv2
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of its own for every test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels)


def _pair(index: int, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    return rng.integers(0, 256, (24, 40, 3), dtype=np.uint8), rng.choice(np.array(ids, np.uint8), (24, 40))


@pytest.fixture
def camvid_folders(tmp_path) -> Path:
    """{split}/images/*.jpg and {split}/labels/*.png: 6 training, 2 validation, 2 test images."""
    root = tmp_path / "camvid"
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        for index in range(count):
            image, label = _pair(index, list(range(12)))
            write(root / split / "images" / f"0001TP_{index:06d}.jpg", image)
            write(root / split / "labels" / f"0001TP_{index:06d}.png", label)
    return root


@pytest.fixture
def camvid_annot(tmp_path) -> Path:
    """{split}/*.png and {split}annot/*.png."""
    root = tmp_path / "camvid_annot"
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        for index in range(count):
            image, label = _pair(index, list(range(12)))
            write(root / split / f"0001TP_{index:06d}.png", image)
            write(root / f"{split}annot" / f"0001TP_{index:06d}.png", label)
    return root


@pytest.fixture
def cityscapes_root(tmp_path) -> Path:
    """The official archives as unpacked, with the files that we do not read beside those that we do."""
    root = tmp_path / "cityscapes"
    cities = {"train": ("aachen", "bochum"), "val": ("frankfurt",), "test": ("berlin",)}
    for split, names in cities.items():
        for city in names:
            for index in range(2):
                image, label = _pair(index, list(range(34)))
                stem = f"{city}_{index:06d}_000019"
                write(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", image)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", label)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_color.png", image)
                write(root / "gtFine" / split / city / f"{stem}_gtFine_instanceIds.png", label.astype(np.uint16))
                (root / "gtFine" / split / city / f"{stem}_gtFine_polygons.json").write_text("{}")
    (root / "license.txt").write_text("")
    return root
