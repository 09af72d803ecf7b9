"""From predictions to scores: one confusion matrix over a whole split, reduced as the benchmarks do."""

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix


def confusion_matrix(predictions: Tensor, labels: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Pixel counts, int64 (classes, classes): rows are labels, columns predictions; ignored labels do not count.

    predictions and labels: the same shape, integer dtypes.
    """
    return multiclass_confusion_matrix(
        predictions.long(), labels.long(), num_classes=classes, ignore_index=ignore_index, validate_args=False
    )


def segmentation_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """IoU per class and their mean, as the official Cityscapes evaluation reduces them, and the pixel accuracy.

    IoU = TP / (TP + FP + FN) over the whole split, in [0, 1]. A class that occurs neither in labels nor in predictions
    has no IoU (None) and does not enter the mean.

    Args:
        confusion: int64 (K, K), rows are labels.
        classes: K names.

    Returns:
        {"miou": float, "iou": {name: float or None}, "pixel_accuracy": float}; NaN where no pixel is labelled.
    """
    counts = confusion.to("cpu", torch.float64)
    true_positives = counts.diag()
    union = counts.sum(dim=0) + counts.sum(dim=1) - true_positives
    iou = true_positives / union  # 0 / 0 = NaN
    return {
        "miou": iou.nanmean().item(),
        "iou": {
            name: value if pixels > 0 else None
            for name, value, pixels in zip(classes, iou.tolist(), union.tolist(), strict=True)
        },
        "pixel_accuracy": (true_positives.sum() / counts.sum()).item(),
    }
