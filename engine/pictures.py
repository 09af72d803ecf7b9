"""Pictures of predictions for people to look at."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import cv2
import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from datasets import SegmentationDataset

OVERLAY_OPACITY = 0.6
matplotlib.rcParams["text.parse_math"] = False  # a $ in the name of a class or an image is one


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
            panels.append(labelled(image, train_ids, dataset))
    return np.concatenate(panels, axis=1)


def labelled(image: np.ndarray, train_ids: np.ndarray, dataset: SegmentationDataset) -> np.ndarray:
    """Train ids, uint8 (H, W), blended over their image, uint8 (H, W, 3) RGB; ignored pixels show the plain image."""
    blended = overlay(image, dataset.colour(train_ids))
    return np.where((train_ids == dataset.ignore_index)[..., None], image, blended)


def overlay(image: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Colours of a prediction blended over its image, all uint8 (H, W, 3) RGB."""
    return cv2.addWeighted(colours, OVERLAY_OPACITY, image, 1 - OVERLAY_OPACITY, 0)


def legend(labels: Iterable[np.ndarray], dataset: SegmentationDataset) -> list[Patch]:
    """Colours, names and shares of the classes that occur in labels, uint8 (H, W), by share; last what is ignored."""
    pixels = sum(np.bincount(label.reshape(-1), minlength=256) for label in labels)
    shares = 100 * pixels / pixels.sum()
    present = [
        class_id
        for class_id in np.argsort(-pixels, kind="stable")
        if pixels[class_id] and class_id != dataset.ignore_index
    ]
    patches = [_patch(dataset.palette[i], f"{dataset.classes[i]} {shares[i]:.1f} %") for i in present]
    ignored = f"ignored {shares[dataset.ignore_index]:.1f} %"
    return [*patches, Patch(facecolor="white", edgecolor="gray", hatch="////", label=ignored)]


def class_legend(dataset: SegmentationDataset) -> Figure:
    """The colours of all classes; up to 40 of them as wide as a card of TensorBoard, so that it is shown as it is."""
    handles = [_patch(colour, name) for colour, name in zip(dataset.palette, dataset.classes, strict=True)]
    columns = max(2, -(-len(handles) // 20))
    rows = -(-len(handles) // columns)
    figure = Figure(figsize=(1.75 * columns, 0.22 * rows + 0.2))  # inches of 100 pixels
    figure.legend(handles=handles, loc="center", ncols=columns, frameon=False)
    return figure


def _patch(colour: tuple[int, int, int], label: str) -> Patch:
    return Patch(facecolor=np.array(colour) / 255, edgecolor="gray", label=label)


def confusion_picture(confusion: np.ndarray, classes: tuple[str, ...], title: str) -> Figure:
    """Which share of each class's pixels is predicted as what, in percent; rows are labels, int (K, K).

    Rows without pixels stay empty.
    """
    pixels = confusion.sum(axis=1, keepdims=True)
    percent = np.where(pixels > 0, 100 * confusion / np.maximum(pixels, 1), np.nan)
    side = 3 + 0.24 * len(classes)  # inches: room for a number in every cell
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(percent, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100))  # a few percent must be seen
    for row, column in zip(*np.nonzero(percent >= 0.5), strict=True):
        colour = "white" if percent[row, column] > 40 else "black"
        text = f"{percent[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=8)
    axes.set_yticks(range(len(classes)), classes, fontsize=8)
    axes.set(xlabel="predicted", ylabel="label")
    axes.set_title(f"{title}: % of each label's pixels", loc="left")
    figure.colorbar(shown, ax=axes, shrink=0.5, aspect=30, pad=0.01)
    return figure


def writable_folder(key: str, folder: Path) -> Path:
    """The folder, made where it is not there; ValueError, naming the key that it is from, if nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{key}: {folder} is not a folder to write to ({error.strerror}); give {key}=… another"
        ) from error
    return folder


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
