"""Pictures of labels and predictions, and files for the official evaluation scripts."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from datasets import IGNORED, ClassificationDataset, SegmentationDataset
from datasets.segmentation import visible
from engine.process.output_files import check_outside, claim_folder, png
from engine.process.transfers import HostCopy

OVERLAY_OPACITY = 0.6
LONGEST_SIDE = 1_024  # pixels, of each picture in TensorBoard


class PictureCollector:
    """Collects comparisons of the split's first `count` images. Nothing waits for the device until `pictures`."""

    def __init__(self, dataset: SegmentationDataset, count: int):
        self.dataset = dataset
        self.names = {entry.name for entry in dataset.files[:count]}
        self.shown: dict[str, HostCopy] = {}

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        for number, name in enumerate(minibatch["name"]):
            if name in self.names:
                self.shown[name] = HostCopy(compared_images(minibatch, predictions, number, self.dataset.shown))

    def pictures(self) -> dict[str, np.ndarray]:
        """{name: uint8 (H, 3 W, 3)}; H and W are at most `LONGEST_SIDE`."""
        return {name: _picture(self.dataset, *map(_shrunk, copied.wait())) for name, copied in self.shown.items()}


def folder_for_pictures(
    key: str, path: str, dataset: SegmentationDataset | ClassificationDataset, names: Collection[str]
) -> Path:
    """The folder for pictures, see `claim_folder`. ValueError: they would become images, or replace labels."""
    folder = Path(path).resolve()
    if isinstance(dataset, ClassificationDataset):
        check_outside(key, folder, [dataset.files.root] if dataset.pixels is None else [])
        return claim_folder(key, folder, names)
    # Names are paths below the folder of images.
    images = {file.image.parents[file.name.count("/")] for file in dataset.files if file.image is not None}
    check_outside(key, folder, images)
    labels = {file.label.parents[file.name.count("/")] for file in dataset.files if file.label is not None}
    if folder in {place.resolve() for place in labels}:
        raise ValueError(f"{key}={folder} holds labels of the dataset, which would be replaced: give another folder")
    return claim_folder(key, folder, names)


def official_png(dataset: SegmentationDataset, copied: HostCopy) -> bytes:
    """A prediction as a PNG in the dataset's official encoding. `copied`: see `compared_images`."""
    return png(dataset.table.official(copied.wait()[2].numpy()), dataset.prediction_palette)


def overlay_png(dataset: SegmentationDataset, copied: HostCopy) -> bytes:
    """A PNG of image | ground truth | prediction."""
    return png(_picture(dataset, *copied.wait()))


def compared_images(
    minibatch: dict, predictions: Tensor, number: int, shown: Sequence[int] | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One image uint8 (3, H, W), its label, if any, and its prediction, uint8 (H, W), on the device.

    `shown`: see `visible`.
    """
    label = minibatch["label"][number] if "label" in minibatch else None
    image = minibatch["image"][number]
    channels = visible(len(image), shown)
    if channels != (*range(len(image)),):
        image = torch.stack([image[channel] for channel in channels])
    return image, label, predictions[number]


def _shrunk(pixels: Tensor | None) -> Any:
    """An image uint8 (3, H, W), or classes uint8 (H, W), shrunk to sides of `LONGEST_SIDE`. Classes do not mix."""
    if pixels is None or max(pixels.shape[-2:]) <= LONGEST_SIDE:
        return pixels
    size = [max(1, round(side * LONGEST_SIDE / max(pixels.shape[-2:]))) for side in pixels.shape[-2:]]
    mode, planes = ("area", pixels) if pixels.ndim == 3 else ("nearest-exact", pixels[None])
    return interpolate(planes[None].float(), size, mode=mode).round().byte().reshape(*pixels.shape[:-2], *size)


def _picture(dataset: SegmentationDataset, image: Tensor, label: Tensor | None, prediction: Tensor) -> np.ndarray:
    """Image | ground truth | prediction of what `compared_images` returns, uint8 (H, 3 W, 3) RGB, or (H, 2 W, 3).

    The last two are blended over the image. Ignored pixels show the plain image.
    """
    pixels = image.permute(1, 2, 0).numpy()
    parts = [prediction] if label is None else [label, prediction]
    return np.concatenate([pixels, *(labelled(pixels, part.numpy(), dataset) for part in parts)], axis=1)


def labelled(image: np.ndarray, train_ids: np.ndarray, dataset: SegmentationDataset) -> np.ndarray:
    """Blend train ids, uint8 (H, W), over their image, uint8 (H, W, 3) RGB; ignored pixels show the plain image."""
    blended = overlay(image, dataset.table.colour(train_ids))
    return np.where((train_ids == IGNORED)[..., None], image, blended)


def overlay(image: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Blend the colours of a prediction over its image, all uint8 (H, W, 3) RGB."""
    return cv2.addWeighted(colours, OVERLAY_OPACITY, image, 1 - OVERLAY_OPACITY, 0)
