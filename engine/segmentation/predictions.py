"""Keep predictions as pictures, or as files for the official evaluation scripts."""

from pathlib import Path

import numpy as np
from torch import Tensor

from datasets import SegmentationDataset
from engine.output_files import inside, write_png
from engine.segmentation.pictures import comparison


class PictureCollector:
    """Collects comparisons of the split's first `count` images, {name: uint8 (H, 3 W, 3)}."""

    def __init__(self, dataset: SegmentationDataset, count: int):
        self.dataset = dataset
        self.count = count
        self.pictures: dict[str, np.ndarray] = {}

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        if int(minibatch["index"][0]) < self.count:
            self.pictures[minibatch["name"][0]] = _comparison(self.dataset, minibatch, predictions)


class PredictionWriter:
    """Writes predictions to files.

    Args:
        predictions: folder for one PNG per image in the dataset's official encoding; None writes none.
        overlays: folder for pictures: image | ground truth | prediction; None writes none.
        overlay_images: how many of the split's first images get an overlay; None is all.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        predictions: Path | None,
        overlays: Path | None,
        overlay_images: int | None,
    ):
        self.dataset = dataset
        self.predictions = predictions
        self.overlays = overlays
        self.overlay_images = len(dataset) if overlay_images is None else overlay_images

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        name = self.dataset.prediction_filename(minibatch["name"][0])
        if self.predictions is not None:
            encoded = self.dataset.encode_prediction(predictions[0].numpy())
            write_png(inside(self.predictions, name), encoded, self.dataset.prediction_palette)
        if self.overlays is not None and int(minibatch["index"][0]) < self.overlay_images:
            write_png(inside(self.overlays, name), _comparison(self.dataset, minibatch, predictions))


def _comparison(dataset: SegmentationDataset, minibatch: dict, predictions: Tensor) -> np.ndarray:
    """The comparison for a minibatch of one image, with predictions uint8 (1, H, W)."""
    image = minibatch["image"][0].permute(1, 2, 0).numpy()  # (H, W, 3)
    label = minibatch["label"][0].numpy() if "label" in minibatch else None
    if label is not None:  # classes that only the benchmark scores are shown as ignored
        label = np.where(label < len(dataset.classes), label, dataset.ignore_index).astype(np.uint8)
    return comparison(image, label, predictions[0].numpy(), dataset)
