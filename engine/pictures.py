"""Pictures of predictions for people to look at."""

import os
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from datasets import SegmentationDataset

OVERLAY_OPACITY = 0.6


def comparison(
    image: np.ndarray, label: np.ndarray | None, prediction: np.ndarray, dataset: SegmentationDataset
) -> np.ndarray:
    """image | ground truth | prediction side by side, the latter two blended over the image.

    Args:
        image: uint8 (H, W, 3) RGB.
        label: train ids, uint8 (H, W), or None. Ignored pixels show the plain image.
        prediction: train ids, uint8 (H, W).

    Returns:
        uint8 (H, 3 W, 3) RGB, or (H, 2 W, 3) without a label.
    """
    panels = [image]
    for train_ids in (label, prediction):
        if train_ids is not None:
            blended = cv2.addWeighted(dataset.colour(train_ids), OVERLAY_OPACITY, image, 1 - OVERLAY_OPACITY, 0)
            panels.append(np.where((train_ids == dataset.ignore_index)[..., None], image, blended))
    return np.concatenate(panels, axis=1)


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder; ValueError where a name that came with data leads out of it (.., /, a link)."""
    path = Path(os.path.realpath(folder / name))
    folder = Path(os.path.realpath(folder))
    if folder not in path.parents:
        raise ValueError(f"the name {name!r} would be written to {path}, outside of {folder}: rename it in the data")
    return path


def write_png(path: Path, pixels: np.ndarray, palette: np.ndarray | None = None) -> None:
    """Write uint8 (H, W) or RGB (H, W, 3) pixels; makes the folder.

    `palette`: uint8 (256, 3) RGB, for a palette PNG whose indices are `pixels` (H, W).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if palette is not None:
        indexed = Image.fromarray(pixels)
        indexed.putpalette(palette.tobytes())  # keeps the pixels; convert("P") would look for similar colours
        indexed.save(path, "PNG")
        return
    if pixels.ndim == 3:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    encoded, data = cv2.imencode(".png", pixels)
    assert encoded, path
    path.write_bytes(data.tobytes())
