"""Losses of logits (N, classes, h, w), upsampled to labels (N, H, W); every crop has the same weight."""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import upsampled_cross_entropy
from keepless.losses import mean_of_largest
from models.segmentation import Output, Outputs, upsampled


class Batch(NamedTuple):
    """A micro-batch, for a loss whose `forward` names an argument `batch`."""

    images: Tensor  # levels of 0 to 255, (N, channels, H, W), on the device
    names: list[str]  # of the N images
    step: int  # of the run, from 1 on
    epoch: float  # at the step's end, as in metrics.jsonl


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
        self.ignore_index = ignore_index
        self.fraction = fraction
        self.tiles = tiles
        self.stride = stride
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


class SummedLoss(nn.Module):
    """The chosen loss of each of a network's outputs, times its weight, in a sum.

    Args:
        make: stride -> the loss of logits (N, K, h, w) with such cells and labels (N, H, W), a scalar; None: the cells
            are stretched to the labels.
        strides: of outputs, whose losses are made now. Others are made when they come.

    `asks_for_batch`: whether these losses are to be given the `Batch`.
    """

    def __init__(self, make: Callable[[int | None], nn.Module], strides: Iterable[int | None] = (None,)):
        super().__init__()
        self.make = make
        self.losses = nn.ModuleDict({str(stride): make(stride) for stride in strides})
        self._first_checksums = {stride: _checksums(loss) for stride, loss in self.losses.items()}
        self.asks_for_batch = any("batch" in signature(loss.forward).parameters for loss in self.losses.values())

    def forward(self, outputs: Outputs | Tensor, labels: Tensor, **batch: Batch) -> Tensor:
        """Outputs, or logits alone, of any floating dtype, labels (N, H, W) of any integer dtype -> scalar.

        ValueError: a loss returns no scalar, or none has a gradient, though the logits have.
        """
        if isinstance(outputs, Tensor):
            return self._scalar(None, outputs, labels, batch)
        total = self._weighted(outputs.main, labels, batch)
        for output in outputs.auxiliary:
            total = total + self._weighted(output, labels, batch)
        if torch.is_grad_enabled() and outputs.main.logits.requires_grad and not total.requires_grad:
            name = type(self.losses[str(outputs.main.stride)]).__name__
            raise ValueError(
                f"{name} returned a tensor without a gradient: compute it from the logits, without detach(), item(), "
                f"argmax or torch.no_grad()"
            )
        return total

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The states of the losses, by stride, without parameters that have not changed, such as a teacher's."""
        states = {}
        for stride, loss in self.losses.items():
            unchanged = dict(self._first_checksums.get(stride, {}).items() & _checksums(loss).items())
            states[stride] = {name: value for name, value in loss.state_dict().items() if name not in unchanged}
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what `state_dict` has returned. RuntimeError: a loss's state has other names or shapes."""
        for stride, state in states.items():
            loss = self.losses[stride]
            loss.load_state_dict({**loss.state_dict(), **state})

    def _weighted(self, output: Output, labels: Tensor, batch: dict[str, Batch]) -> Tensor:
        loss = self._scalar(output.stride, output.logits, labels, batch)
        return loss if output.weight == 1 else output.weight * loss

    def _scalar(self, stride: int | None, logits: Tensor, labels: Tensor, batch: dict[str, Batch]) -> Tensor:
        if str(stride) not in self.losses:
            self.losses[str(stride)] = self.make(stride).to(logits.device)
        loss = self.losses[str(stride)]
        value = loss(logits, labels, **batch)
        if not isinstance(value, Tensor) or value.dim():
            returned = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{type(loss).__name__} returned {returned}: expected a scalar, the mean over the images")
        return value


def _checksums(loss: nn.Module) -> dict[str, int]:
    """A checksum of each parameter."""
    checksums = {name: torch.hash_tensor(parameter.detach()) for name, parameter in loss.named_parameters()}
    return {name: checksum.cpu().numpy().item() for name, checksum in checksums.items()}


def inverse_frequencies(counts: Tensor) -> Tensor:
    """1 / (K f) for K classes with shares f of the labelled pixels, float32 (K,): pixels weigh 1 on average.

    `counts`: pixels, int64 (classes,). Classes without a pixel do not count in K and have weight 0.
    """
    present = counts > 0
    weights = counts.sum() / (present.sum() * counts.double())
    return torch.where(present, weights, 0.0).float()
