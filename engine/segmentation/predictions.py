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


def write_predictions(
    dataset: SegmentationDataset, folder: Path | None, overlays: Path | None, minibatch: dict, predictions: Tensor
) -> None:
    """Write predictions as PNGs. Writing an image waits for its prediction; images without a file cost nothing.

    `folder`: for the dataset's official encoding; None writes none. `overlays`: for image | ground truth | prediction.
    """
    for number, name in enumerate(minibatch["name"]):
        if folder is not None:
            encoded = dataset.table.official(predictions[number].cpu().numpy())
            write_png(folder / f"{name}.png", encoded, dataset.prediction_palette)
        if overlays is not None:
            write_png(overlays / f"{name}.png", _picture(dataset, *_compared(minibatch, predictions, number)))


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
