"""Losses of logits (N, classes, h, w), upsampled to labels (N, H, W); every crop has the same weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import upsampled_cross_entropy
from keepless.losses import mean_of_largest
from models.segmentation import upsampled


class CrossEntropy(nn.Module):
    """Mean over crops of each crop's mean loss over its labelled pixels; zero for a crop without any.

    Args:
        ignore_index: label of pixels without loss.
        weights: of the classes, (K,), by which their pixels' losses are multiplied; None: 1.
        fraction: online bootstrapping (paper, section 4.2, with p = 1 and m = 25%): a crop's loss is the mean of its
            k = ceil(fraction * H * W) largest (weighted) pixel losses. Ignored pixels have zero loss and gradient, so
            they dilute only crops with less than `fraction` of their pixels labelled. None: all labelled pixels count.
        tiles: upsample the logits a tile at a time (`upsampled_cross_entropy`), instead of all at once.
        stride: pixels that a cell of the logits covers along a side; None: the cells are stretched to the labels.
    """

    def __init__(
        self,
        ignore_index: int = 255,
        weights: Tensor | None = None,
        *,
        fraction: float | None = None,
        tiles: bool = True,
        stride: int | None = None,
    ):
        super().__init__()
        self.ignore_index, self.fraction, self.tiles, self.stride = ignore_index, fraction, tiles, stride
        self.weights: Tensor | None
        self.register_buffer("weights", weights)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (N, K, h, w) of any floating dtype, labels (N, H, W) of any integer dtype -> scalar, float32 or 64."""
        if self.tiles:
            return upsampled_cross_entropy(
                logits,
                labels,
                weight=self.weights,
                ignore_index=self.ignore_index,
                fraction=self.fraction,
                stride=self.stride,
            )
        logits = upsampled(logits, labels.shape[1:], self.stride)
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        weights = None if self.weights is None else self.weights.to(logits.dtype)
        options: dict = {"ignore_index": self.ignore_index, "reduction": "none"}
        losses = F.cross_entropy(logits, labels.long(), weights, **options).flatten(1)  # (N, H * W); ignored: 0
        if self.fraction is None:
            labelled = (labels != self.ignore_index).flatten(1).sum(dim=1).clamp(min=1)
            return (losses.sum(dim=1) / labelled).mean()
        return mean_of_largest(losses, self.fraction)[0]


def inverse_frequencies(counts: Tensor) -> Tensor:
    """1 / (K f) for K classes with shares f of the labelled pixels, float32 (K,): pixels weigh 1 on average.

    `counts`: pixels, int64 (classes,). Classes without a pixel do not count in K and have weight 0.
    """
    present = counts > 0
    weights = counts.sum() / (present.sum() * counts.double())
    return torch.where(present, weights, 0.0).float()
