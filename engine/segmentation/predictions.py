"""Keep predictions as pictures, or as files for the official evaluation scripts."""

from pathlib import Path

import numpy as np
from torch import Tensor

from datasets import SegmentationDataset
from engine.process.output_files import write_png
from engine.process.transfers import HostCopy
from engine.segmentation.pictures import comparison


class PictureCollector:
    """Collects comparisons of the split's first `count` images. Nothing waits for the device until `pictures`."""

    def __init__(self, dataset: SegmentationDataset, count: int):
        self.dataset = dataset
        self.names = {entry.name for entry in dataset.files[:count]}
        self.shown: dict[str, HostCopy] = {}

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        for number, name in enumerate(minibatch["name"]):
            if name in self.names:
                self.shown[name] = HostCopy(_compared(minibatch, predictions, number))

    def pictures(self) -> dict[str, np.ndarray]:
        """{name: uint8 (H, 3 W, 3)}"""
        return {name: _picture(self.dataset, *copied.wait()) for name, copied in self.shown.items()}


class PredictionWriter:
    """Writes predictions to files. Writing an image waits for its prediction; images without a file cost nothing.

    Args:
        predictions: folder for one PNG per image in the dataset's official encoding; None writes none.
        overlays: folder for pictures: image | ground truth | prediction; None writes none.
    """

    def __init__(self, dataset: SegmentationDataset, predictions: Path | None, overlays: Path | None):
        self.dataset = dataset
        self.predictions = predictions
        self.overlays = overlays

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        for number, name in enumerate(minibatch["name"]):
            file = f"{name}.png"
            if self.predictions is not None:
                encoded = self.dataset.table.official(predictions[number].cpu().numpy())
                write_png(self.predictions / file, encoded, self.dataset.prediction_palette)
            if self.overlays is not None:
                picture = _picture(self.dataset, *_compared(minibatch, predictions, number))
                write_png(self.overlays / file, picture)


def _compared(minibatch: dict, predictions: Tensor, number: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """One image uint8 (3, H, W), its label, if any, and its prediction, uint8 (H, W), on the device."""
    label = minibatch["label"][number] if "label" in minibatch else None
    return minibatch["image"][number], label, predictions[number]


def _picture(dataset: SegmentationDataset, image: Tensor, label: Tensor | None, prediction: Tensor) -> np.ndarray:
    """The `comparison`, uint8 (H, 3 W, 3), of what `_compared` returns."""
    shown = None
    if label is not None:  # classes that only the benchmark scores are shown as ignored
        train_ids = label.cpu().numpy()
        shown = np.where(train_ids < len(dataset.classes), train_ids, dataset.ignore_index).astype(np.uint8)
    return comparison(image.permute(1, 2, 0).cpu().numpy(), shown, prediction.cpu().numpy(), dataset)
