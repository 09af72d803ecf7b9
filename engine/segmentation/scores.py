"""Count predictions over a split, and reduce the counts to the scores of the paper and the benchmarks."""

import torch
from torch import Tensor

from datasets import IGNORED, ClassTable
from engine.process.distributed import World

CPU = torch.device("cpu")
LANES = 16  # counters per cell of a confusion matrix; 128 bytes of int64, which a GPU adds to at once


class Counts:
    """The counts behind all scores, summed over the images of a split, on `device`.

    `unscored`: int64 (2,), for `inference.predict`: predicted pixels without a finite score, and all.

    `confusion`: int64 (G, G) pixels of the G classes `ClassTable.scored`, rows are labels, columns predictions. Columns
    of classes that the network does not know stay 0.
    """

    def __init__(self, table: ClassTable, device: torch.device = CPU):
        self.classes = len(table.scored)
        self.cells = torch.zeros(self.classes**2 + 2, LANES, dtype=torch.int64, device=device)  # `unscored` is last

    @property
    def confusion(self) -> Tensor:
        return self.cells[:-2].sum(dim=1).view(self.classes, self.classes)

    @property
    def unscored(self) -> Tensor:
        return self.cells[-1, :2]

    def add(self, predictions: Tensor, minibatch: dict) -> None:
        """Add predictions, uint8 (N, H, W), for a minibatch of `datasets.WholeImages`, all on the counts' device.

        The host does not wait for a GPU, so it can prepare the next images meanwhile.
        """
        count_pixels(self.cells[:-1], predictions, minibatch["label"], self.classes)

    def add_up(self, world: World) -> None:
        """Sum over all ranks and move to the CPU, where `all_scores` reads the counts. This waits for all images."""
        self.cells = world.sum_(self.cells).cpu()


def count_pixels(cells: Tensor, predictions: Tensor, labels: Tensor, classes: int) -> None:
    """Add pixels to the cells of a confusion matrix, int64 (classes^2 + 1, lanes); the last cell counts ignored pixels.

    A cell's count is the sum of its lanes. Neighbouring columns of an image, often of one class, count in different
    lanes, because a GPU adds pixels to a single counter one by one. (Several lanes do not slow down a CPU.)

    predictions and labels: the same shape, integer dtypes. Memory and time do not grow with the number of classes, even
    with deterministic algorithms (where torchmetrics compares every pixel with every cell of the matrix).
    """
    lanes = cells.shape[1]
    lane = torch.arange(labels.shape[-1], dtype=torch.int32, device=labels.device).remainder_(lanes)
    numbers = labels.to(torch.int32, copy=True).mul_(classes).add_(predictions)
    numbers.masked_fill_(labels == IGNORED, classes**2)
    numbers.mul_(lanes).add_(lane)
    # `torch.bincount` would make the host wait for the largest number.
    one = torch.ones(1, dtype=cells.dtype, device=cells.device)
    cells.view(-1).index_add_(0, numbers.flatten(), one.expand(numbers.numel()))


def all_scores(counts: Counts, table: ClassTable) -> dict:
    """Compute the paper's `segmentation_scores`, and under "official" the scores of the dataset's benchmark.

    The paper's score leaves out pixels of classes that only the benchmark counts, which no network predicts.
    """
    trained = len(table.names)
    scores = segmentation_scores(counts.confusion[:trained, :trained], table.names)
    # The benchmarks of Cityscapes and Vistas drop labels that they do not evaluate; we neither count nor predict them.
    official = {"miou": scores["miou"]} if table.benchmark else {}
    if table.benchmark == "coco_stuff":
        official = coco_stuff_scores(counts.confusion, table.scored)
    return {**scores, "official": official}


def segmentation_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """IoU per class, mean IoU (reduced as in the official Cityscapes evaluation) and pixel accuracy.

    IoU = TP / (TP + FP + FN) over the whole split, in [0, 1]. A class that occurs neither in labels nor in predictions
    has no IoU (None) and is left out of the mean.

    `confusion`: int64 (K, K) pixels of the K `classes`, rows are labels.

    Returns:
        {"miou": float, "iou": {name: float or None}, "pixel_accuracy": float}; NaN if no pixel is labelled.
    """
    counts = confusion.to("cpu", torch.float64)
    true_positives = counts.diag()
    iou = true_positives / _union(counts)  # 0 / 0 = NaN
    return {
        "miou": iou.nanmean().item(),
        "iou": _by_name(classes, iou),
        "pixel_accuracy": (true_positives.sum() / counts.sum()).item(),
    }


def coco_stuff_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """Compute what `COCOStuffeval` of the cocostuffapi reports for its 92 leaf classes; means are over labelled ones.

    `confusion`: int64 (G, G) pixels of the G `classes`, rows are labels.

    Returns:
        {"miou", "iou": {name: float or None}, "pixel_accuracy", "mean_accuracy", "frequency_weighted_iou"}.
    """
    counts = confusion.double()
    labelled = counts.sum(dim=1)
    present = labelled > 0
    iou = torch.where(present, counts.diag() / _union(counts), torch.nan)
    return {
        "miou": _mean(iou),
        "iou": _by_name(classes, iou),
        "pixel_accuracy": _value(counts.diag().sum() / labelled.sum()),
        "mean_accuracy": _mean(counts.diag() / labelled),
        "frequency_weighted_iou": _value((iou * labelled / labelled.sum())[present].sum()),
    }


def _union(confusion: Tensor) -> Tensor:
    """TP + FN + FP, (K, K) -> (K,)"""
    return confusion.sum(dim=1) + confusion.sum(dim=0) - confusion.diag()


def _mean(values: Tensor) -> float | None:
    """Mean of the values that are not NaN; None if all are."""
    return _value(values.nanmean())


def _value(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()


def _by_name(names: tuple[str, ...], values: Tensor) -> dict[str, float | None]:
    """{name: value, or None for NaN}"""
    return {name: _value(value) for name, value in zip(names, values, strict=True)}
