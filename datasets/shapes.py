"""Drawn shapes of 32x32 pixels in random colours, places and rotations: a small dataset for trying things out."""

import os
from pathlib import Path

import numpy as np

from datasets.classification import ClassificationDataset
from datasets.file_list import FileList
from datasets.row import Row

IMAGES = {"train": 4000, "val": 1000}
SIDE = 32  # pixels

_SEEDS = {"train": 0, "val": 1}
_NOISE = 24  # levels, the largest change of a pixel
_CONTRAST = 80  # levels, the smallest difference between shape and background in some colour


def shapes(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """One split, "train" (4,000 images) or "val" (1,000), of eight classes in turn, in memory; always the same pixels.

    ValueError if the split is unknown, or a `root` is given: there are no files.
    """
    if split not in IMAGES:
        raise ValueError(f"split {split!r} is unknown to shapes; expected one of {', '.join(IMAGES)}")
    if root is not None:
        raise ValueError(f"shapes are synthetic, not read from {root}: give no folder")
    count = IMAGES[split]
    labels = np.arange(count) % len(CLASSES)
    pixels = np.stack(
        [draw_shape(label, np.random.default_rng([_SEEDS[split], i])) for i, label in enumerate(labels.tolist())]
    )
    names = np.array([f"{split} {number}" for number in range(count)])
    zeros = np.zeros(count, np.int64)
    files = FileList(Path(), names.astype("S"), zeros, zeros)
    return ClassificationDataset("shapes", split, CLASSES, labels, files, pixels, names)


def draw_shape(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a shape of class `label`: uint8 (3, 32, 32) RGB."""
    radius = rng.uniform(7, 13)
    angle = rng.uniform(0, 2 * np.pi)
    x, y = (np.arange(SIDE) - rng.uniform(radius, SIDE - radius) for _ in range(2))
    x = x[None, :] / radius  # the shape reaches about from -1 to 1
    y = y[:, None] / radius
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    background, colour = rng.integers(0, 256, (2, 3, 1, 1))
    while np.abs(background - colour).max() < _CONTRAST:
        colour = rng.integers(0, 256, (3, 1, 1))
    noise = rng.integers(-_NOISE, _NOISE + 1, (3, SIDE, SIDE))
    return np.clip(np.where(_inside(CLASSES[label], u, v), colour, background) + noise, 0, 255).astype(np.uint8)


CLASSES = ("bar", "checkerboard", "cross", "disc", "frame", "ring", "square", "triangle")


def _inside(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Whether each point is inside the shape, bool (32, 32). u, v: coordinates that turn with the shape."""
    distance = np.hypot(u, v)
    side = np.maximum(abs(u), abs(v))
    thin = np.minimum(abs(u), abs(v))
    return {
        "bar": (abs(u) <= 1) & (abs(v) <= 0.25),
        "checkerboard": (side <= 0.85) & ((np.floor(u / 0.425) + np.floor(v / 0.425)) % 2 == 0),
        "cross": (side <= 0.95) & (thin <= 0.25),
        "disc": distance <= 0.9,
        "frame": (side <= 0.85) & (side >= 0.5),
        "ring": (distance <= 0.95) & (distance >= 0.6),
        "square": side <= 0.8,
        "triangle": (v >= -0.6) & (abs(u) <= 0.58 * (1 - v)) & (v <= 1),
    }[name]


SHAPES = Row(shapes, IMAGES, classes=8, drawn=True)
