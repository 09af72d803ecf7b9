"""Losses of logits (N, classes, H, W) and labels (N, H, W); every crop has the same weight."""

import math

import torch.nn.functional as F
from torch import Tensor, nn


class CrossEntropy(nn.Module):
    """Mean over crops of each crop's mean loss over its labelled pixels; zero for a crop without any."""

    def __init__(self, ignore_index: int = 255):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (N, K, H, W) of any floating dtype, labels (N, H, W) of any integer dtype -> float32 scalar."""
        losses = pixel_losses(logits, labels, self.ignore_index)
        labelled = (labels != self.ignore_index).flatten(1).sum(dim=1).clamp(min=1)
        return (losses.sum(dim=1) / labelled).mean()


class BootstrappedCrossEntropy(nn.Module):
    """Online bootstrapping (paper, section 4.2, with p = 1 and m = 25%): only the hardest pixels of a crop count.

    A crop's loss is the mean of its k = ceil(fraction * H * W) largest pixel losses. Ignored pixels have zero loss and
    gradient, so they dilute only crops with less than `fraction` of their pixels labelled.
    """

    def __init__(self, fraction: float = 0.25, ignore_index: int = 255):
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: expected a share of the pixels, above 0 and at most 1")
        self.fraction = fraction
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (N, K, H, W) of any floating dtype, labels (N, H, W) of any integer dtype -> float32 scalar."""
        losses = pixel_losses(logits, labels, self.ignore_index)
        k = math.ceil(self.fraction * losses.shape[1])
        return losses.topk(k, dim=1, sorted=False).values.mean()


def pixel_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy of every pixel, (N, H * W), at least float32; zero where the label is `ignore_index`."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, labels.long(), ignore_index=ignore_index, reduction="none").flatten(1)
