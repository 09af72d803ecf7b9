"""Count predictions over a split, and reduce the counts to the scores of the paper."""

import csv
from collections.abc import Sequence
from io import StringIO
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datasets import IGNORED
from engine.process.distributed import World
from engine.process.output_files import writable_file, write_file
from engine.records.evaluated import without_nan

CPU = torch.device("cpu")
PER_CLASS = ("iou", "accuracy")  # scores of each class
LANES = 16  # counters per cell of a confusion matrix; 128 bytes of int64, which a GPU adds to at once


class Counts:
    """The counts behind all scores, summed over the images of a split, on `device`.

    `unscored`: int64 (2,), for `inference.predict`: predicted pixels without a finite score, and all.

    `confusion`: int64 (K, K) pixels of the K classes, rows are labels, columns predictions.

    A cell's count is the sum of its lanes. Neighbouring columns of an image, often of one class, count in different
    lanes, because a GPU adds pixels to a single counter one by one. (Several lanes do not slow down a CPU.)
    """

    def __init__(self, class_count: int, device: torch.device = CPU):
        self.class_count = class_count
        # Of the confusion matrix, then of ignored pixels, then `unscored`.
        self.cells = torch.zeros(class_count**2 + 2, LANES, dtype=torch.int64, device=device)

    @property
    def confusion(self) -> Tensor:
        return self.cells[:-2].sum(dim=1).view(self.class_count, self.class_count)

    @property
    def unscored(self) -> Tensor:
        return self.cells[-1, :2]

    def add(self, predictions: Tensor, labels: Tensor) -> None:
        """Add predictions for labels, of one shape and integer dtypes, both on the counts' device.

        The host does not wait for a GPU, so it can prepare the next images meanwhile. Memory and time do not grow with
        the number of classes, even with deterministic algorithms (where torchmetrics compares every pixel with every
        cell of the matrix).
        """
        lane = torch.arange(labels.shape[-1], dtype=torch.int32, device=labels.device).remainder_(LANES)
        numbers = labels.to(torch.int32, copy=True).mul_(self.class_count).add_(predictions)
        numbers.masked_fill_(labels == IGNORED, self.class_count**2)
        numbers.mul_(LANES).add_(lane)
        # `torch.bincount` would make the host wait for the largest number.
        ones = torch.ones(1, dtype=self.cells.dtype, device=self.cells.device).expand(numbers.numel())
        self.cells.view(-1).index_add_(0, numbers.flatten(), ones)

    def add_up(self, world: World) -> None:
        """Sum over all ranks and move to the CPU, where the scores are computed. This waits for all images."""
        self.cells = world.sum_(self.cells).cpu()


def segmentation_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """IoU per class, mean IoU (reduced as in the official Cityscapes evaluation), accuracy per class and of all pixels.

    IoU = TP / (TP + FP + FN) over the whole split, in [0, 1]. A class that occurs neither in labels nor in predictions
    has no IoU (None) and is left out of the mean. A class's accuracy is TP / (TP + FN), None if no label has it.

    `confusion`: int64 (K, K) pixels of the K `classes`, rows are labels.

    Returns:
        {"miou": float, "iou": {name: float or None}, "accuracy": like "iou", "pixel_accuracy": float}; NaN if no pixel
        is labelled.
    """
    counts = confusion.to("cpu", torch.float64)
    true_positives = counts.diag()
    iou = true_positives / (counts.sum(dim=1) + counts.sum(dim=0) - true_positives)  # 0 / 0 = NaN
    shares = {"iou": iou, "accuracy": true_positives / counts.sum(dim=1)}

    return {
        "miou": iou.nanmean().item(),
        **without_nan({kind: dict(zip(classes, shares[kind].tolist(), strict=True)) for kind in PER_CLASS}),
        "pixel_accuracy": (true_positives.sum() / counts.sum()).item(),
    }


class ImageScores:
    """Writes a CSV table of the IoU in every image.

    Columns: name; miou_of_image, over the classes in its label or prediction; of each class iou_CLASS, empty if the
    image lacks it, and the pixels intersection_CLASS and union_CLASS. ValueError, naming `key`: another command wrote
    the file, or it is not writable.
    """

    def __init__(self, classes: Sequence[str], file: Path, key: str = "file"):
        writable_file(key, file, kind="scores of images")
        self.classes = classes
        self.file = file
        self.rows: list[tuple[str, np.ndarray]] = []  # name, and the two counts of each class in this image

    def add(self, minibatch: dict, predictions: Tensor) -> None:
        """Count the images of a minibatch with labels. On a GPU the host waits for it."""
        columns = minibatch["name"], predictions.cpu().numpy(), minibatch["label"].cpu().numpy()
        for name, prediction, label in zip(*columns, strict=True):
            counted = label != IGNORED
            ids = (label[counted & (label == prediction)], label[counted], prediction[counted])
            intersection, labelled, predicted = (np.bincount(pixels, minlength=len(self.classes)) for pixels in ids)
            self.rows.append((name, np.stack([intersection, labelled + predicted - intersection])))

    def write(self, world: World) -> None:
        """Write the images of all ranks, sorted by name. Every rank must call it."""
        columns = [f"{kind}_{name}" for kind in ("iou", "intersection", "union") for name in self.classes]
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["name", "miou_of_image", *columns])
        for name, (intersection, union) in sorted(sum(world.gather(self.rows), []), key=itemgetter(0)):
            pairs = zip(intersection.tolist(), union.tolist(), strict=True)
            iou = [shared / covered if covered else None for shared, covered in pairs]
            present = [share for share in iou if share is not None]
            mean = sum(present) / len(present) if present else None
            table.writerow([name, mean, *iou, *intersection, *union])
        if world.first:
            write_file(self.file, text.getvalue())
