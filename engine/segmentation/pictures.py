"""Pictures of labels and predictions."""

import cv2
import numpy as np
from matplotlib.patches import Patch

from datasets import SegmentationDataset

OVERLAY_OPACITY = 0.6


def comparison(
    image: np.ndarray, label: np.ndarray | None, prediction: np.ndarray, dataset: SegmentationDataset
) -> np.ndarray:
    """Put image | ground truth | prediction side by side, the last two blended over the image.

    `image`: uint8 (H, W, 3) RGB. `label`, which may be None, and `prediction`: train ids, uint8 (H, W); ignored pixels
    show the plain image. Returns uint8 (H, 3 W, 3) RGB, or (H, 2 W, 3) without a label.
    """
    blended = [labelled(image, train_ids, dataset) for train_ids in (label, prediction) if train_ids is not None]
    return np.concatenate([image, *blended], axis=1)


def labelled(image: np.ndarray, train_ids: np.ndarray, dataset: SegmentationDataset) -> np.ndarray:
    """Blend train ids, uint8 (H, W), over their image, uint8 (H, W, 3) RGB; ignored pixels show the plain image."""
    blended = overlay(image, dataset.table.colour(train_ids))
    return np.where((train_ids == dataset.ignore_index)[..., None], image, blended)


def overlay(image: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Blend the colours of a prediction over its image, all uint8 (H, W, 3) RGB."""
    return cv2.addWeighted(colours, OVERLAY_OPACITY, image, 1 - OVERLAY_OPACITY, 0)


def class_patch(colour: tuple[int, int, int], label: str) -> Patch:
    """The legend entry of a class."""
    red, green, blue = (channel / 255 for channel in colour)
    return Patch(facecolor=(red, green, blue), edgecolor="gray", label=label)
