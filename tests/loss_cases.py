"""Cases for the loss of upsampled logits, and what it must compute."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = 255


def plain(logits, labels, *, weight=None, fraction=None, reduction="crops", align_corners=False, stride=None) -> Tensor:
    """The loss by its definition: a sort finds the largest losses, with ties in the order of the pixels."""
    (height, width), cells = labels.shape[1:], logits.shape[2:]
    covered = (height, width) if stride is None else (cells[0] * stride, cells[1] * stride)
    upsampled = F.interpolate(logits, covered, mode="bilinear", align_corners=align_corners)[..., :height, :width]
    pixels = F.cross_entropy(upsampled, labels.long(), weight, ignore_index=IGNORE, reduction="none").flatten(1)
    if fraction is not None:
        k = math.ceil(round(fraction * pixels.shape[1], 6))
        return pixels.sort(dim=1, descending=True, stable=True).values[:, :k].mean()
    if reduction == "mean":
        return F.cross_entropy(upsampled, labels.long(), weight, ignore_index=IGNORE)
    return (pixels.sum(1) / (labels != IGNORE).flatten(1).sum(1).clamp(min=1)).mean()


def value_and_gradient(loss, logits: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    value = loss(logits, labels, **options)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def sample(
    n=2, classes=5, cells=(4, 5), size=(29, 33), ignored=0.2, dtype=torch.float64, seed=0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, *cells, dtype=torch.float64, generator=generator).to(dtype)
    labels = torch.randint(classes, (n, *size), generator=generator)
    labels[torch.rand(n, *size, generator=generator) < ignored] = IGNORE
    return logits, labels.to(torch.uint8)
