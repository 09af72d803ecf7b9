"""Exact losses for segmentation networks, without logits at the resolution of the labels."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .torch_internals import FakeTensor

__all__ = ["mean_of_largest", "upsampled_cross_entropy"]

_TILE_BYTES = {"cpu": 2**20}  # of interpolated logits: about a core's cache
_OTHER_TILE_BYTES = 2**26  # on other devices, for few launches


def upsampled_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = 255,
    fraction: float | None = None,
    reduction: str = "crops",
    align_corners: bool = False,
    stride: int | None = None,
) -> Tensor:
    """Cross-entropy of bilinearly upsampled logits, a tile of rows at a time.

    The value and the gradient are those of `F.interpolate(logits, labels.shape[1:], mode="bilinear")` followed by
    cross-entropy, up to rounding. Neither the upsampled logits, nor their softmax, nor its gradient is ever in memory
    as a whole: besides some values per pixel, there are two tiles of about 1 MiB on a CPU, or 64 MiB elsewhere. The
    gradient of the logits is computed in the forward pass and kept, in at least float32, until the backward pass.
    `torch.compile` breaks the graph at the loss, and does not compile it. Logits are interpolated by matrix products in
    full float32, also where TF32 is allowed: it would round them by about a thousandth of the largest logit.

    With logits at the resolution of the labels, this is a tiled cross-entropy.

    Args:
        logits: (N, K, h, w), float64, float32, bfloat16 or float16; 16-bit logits are interpolated in float32.
        labels: (N, H, W), any integer dtype: classes from 0 to K - 1, or `ignore_index`.
        weight: (K,), factors for the losses of each class's pixels; None: 1.
        ignore_index: label of pixels without loss.
        fraction: online bootstrapping (in-place ABN paper, section 4.2, with p = 1): a crop's loss is the mean of its
            k = ceil(fraction * H * W) largest pixel losses; ignored pixels have loss 0. If pixels tie for the last
            place, the gradient goes to the first of them, row by row. None: all pixels count.
        reduction: "crops": each crop's mean loss over its labelled pixels (0 if it has none), averaged over crops;
            "mean": as in `F.cross_entropy`, the sum over all pixels divided by the sum of their weights.
        align_corners: as in `F.interpolate`.
        stride: pixels that each cell of the logits covers along a side. Logits are upsampled to (h * stride,
            w * stride) and cut to (H, W), for networks that round sizes up. None: they are upsampled to (H, W), which
            stretches the cells of such a network.

    Returns:
        A scalar in float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes do not fit, an option is unknown, `weight` requires a gradient, or with `stride` (h, w) is
            not (ceil(H / stride), ceil(W / stride)).
        IndexError: a label is neither a class nor `ignore_index`; on CUDA an assertion fails.
        RuntimeError: it is differentiated with create_graph=True.
    """
    tensors = (logits, labels) if weight is None else (logits, labels, weight)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "fraction": fraction}
    options |= {"reduction": reduction, "align_corners": align_corners, "stride": stride}
    if has_torch_function(tensors):  # a function mode, such as a recording, sees one call
        return handle_torch_function(upsampled_cross_entropy, tensors, logits, labels, **options)
    _check_arguments(logits, labels, weight, fraction, reduction, stride)
    apply = torch.compiler.disable(_Loss.apply) if torch.compiler.is_compiling() else _Loss.apply
    try:
        return apply(logits, labels, *options.values())
    except (IndexError, RuntimeError) as error:
        _check_labels(labels, logits.shape[1], ignore_index, error)
        raise


def _check_arguments(
    logits: Tensor, labels: Tensor, weight: Tensor | None, fraction: float | None, reduction: str, stride: int | None
) -> None:
    if logits.dim() != 4 or labels.dim() != 3 or logits.shape[0] != labels.shape[0] or not logits.numel():
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}: expected (N, K, h, w) "
            f"and (N, H, W), not empty"
        )
    if stride is not None:
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"stride={stride!r}: expected a number of pixels per cell, such as 8")
        cells = tuple(-(-side // stride) for side in labels.shape[1:])
        if tuple(logits.shape[2:]) != cells:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} with "
                f"stride={stride}: expected {cells[0]}x{cells[1]} cells, as each covers {stride} pixels along a side"
            )
    if not logits.is_floating_point() or labels.is_floating_point():
        raise ValueError(f"logits in {logits.dtype} and labels in {labels.dtype}: expected floats and integers")
    if reduction not in ("crops", "mean"):
        raise ValueError(f"reduction={reduction!r}: expected 'crops' or 'mean'")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: expected a share of the pixels, above 0 and at most 1")
    if fraction is not None and reduction == "mean":
        raise ValueError("fraction with reduction='mean': the largest losses are taken per crop; expected 'crops'")
    if weight is not None and (weight.requires_grad or weight.shape != logits.shape[1:2]):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}{' with a gradient' if weight.requires_grad else ''}: expected "
            f"({logits.shape[1]},), a constant for each class; the loss has no gradient for it"
        )


def _check_labels(labels: Tensor, classes: int, ignore_index: int, error: Exception) -> None:
    """Raise IndexError, from an operator's `error`, if a label is no class. On CUDA no tensor can be read then."""
    if labels.device.type != "cpu" or isinstance(labels, FakeTensor):
        return
    ids = labels.long()  # comparisons lack some dtypes
    wrong = ids[(ids != ignore_index) & ((ids < 0) | (ids >= classes))]
    if wrong.numel():
        raise IndexError(
            f"labels hold {wrong[0]:d}: expected classes from 0 to {classes - 1}, or ignore_index={ignore_index}; if "
            f"{wrong[0]:d} marks pixels without a class, give ignore_index={wrong[0]:d}"
        ) from error


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        fraction: float | None,
        reduction: str,
        align_corners: bool,
        stride: int | None,
    ) -> Tensor:
        """The loss; its gradient with respect to the logits, (N, K, h, w), is kept, or an empty one if not needed."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        gradient = torch.zeros_like(logits, dtype=dtype) if ctx.needs_input_grad[0] else None
        with _full_precision(logits.device.type):
            is_class = labels != ignore_index
            weights = is_class.to(dtype)  # of the pixels, (N, H, W)
            if weight is not None:
                weights *= weight.to(dtype)[labels.where(is_class, 0).long()]
            tiles = _Tiles(logits, labels.where(is_class, 0), weights, align_corners, stride)
            if fraction is None:
                if reduction == "mean":
                    counts = weights.sum()
                else:
                    counts = len(logits) * is_class.sum((1, 2), True).clamp_(min=1)
                shares = weights / counts
                # A share is 0 / 0 if all pixels are ignored.
                losses = tiles.losses_and_gradient(gradient, shares.where(is_class, 0))
                value = (losses * weights / counts).sum()
            else:
                # Without a name for the losses, whose memory would else be held to the end.
                value, shares = mean_of_largest(
                    tiles.losses_and_gradient(None, None).mul_(weights).flatten(1), fraction
                )
                if gradient is not None:
                    tiles.losses_and_gradient(gradient, shares.view_as(weights) * weights)
        ctx.save_for_backward(logits.new_empty(0) if gradient is None else gradient)
        ctx.dtype = logits.dtype
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: upsampled_cross_entropy has no second derivative; interpolate the logits and use "
                "F.cross_entropy"
            )
        gradient = (ctx.saved_tensors[0] * outer).to(ctx.dtype)
        return (gradient, None, None, None, None, None, None, None)


def mean_of_largest(losses: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """The mean of this fraction of each crop's largest losses, and each loss's share in it. `losses`: (N, pixels)."""
    k = max(1, math.ceil(round(fraction * losses.shape[1], 6)))  # 0.07 * 100 is a little above 7
    last = losses.topk(k, sorted=False).values.amin(1, keepdim=True)
    is_chosen = losses > last
    is_tied = losses == last
    room = k - is_chosen.sum(1, keepdim=True)  # for ties
    is_chosen |= is_tied & (is_tied.cumsum(1) <= room)
    shares = is_chosen.to(losses.dtype) / (k * len(losses))
    return (losses * shares).sum(), shares


class _Tiles:
    """Rows of upsampled logits, a tile at a time: the losses of their pixels, and gradients of the logits.

    Each row of upsampled logits mixes two rows of logits, and each pixel two columns: `down` and `across` are mostly 0.
    """

    def __init__(self, logits: Tensor, labels: Tensor, weights: Tensor, align_corners: bool, stride: int | None):
        self.logits = logits
        self.labels = labels
        self.dtype = weights.dtype
        _, classes, height, width = logits.shape
        _, *size = labels.shape
        rows, columns = size if stride is None else (height * stride, width * stride)
        self.heights = (height, rows)
        self.align_corners = align_corners
        self.down = None if height == rows else _interpolation(height, rows, align_corners, weights)[: size[0]]
        self.across = None if width == columns else _interpolation(width, columns, align_corners, weights)[: size[1]]
        limit = _TILE_BYTES.get(logits.device.type, _OTHER_TILE_BYTES)
        self.rows_per_tile = max(1, limit // (classes * size[1] * self.dtype.itemsize))

    def losses_and_gradient(self, gradient: Tensor | None, shares: Tensor | None) -> Tensor:
        """Compute the loss of every pixel, (N, H, W), and add the gradient of their weighted sum to `gradient`.

        `shares`: the weights in this sum. Without both, losses alone are computed.
        """
        losses = torch.empty_like(self.labels, dtype=self.dtype)
        crops = self.logits
        row_count = losses.shape[1]
        if isinstance(crops, FakeTensor):  # the first tile is enough, as all take the same memory
            crops = crops[:1]
            row_count = 1
        for number, logits in enumerate(crops):
            cells = logits.transpose(0, 1).to(self.dtype).contiguous()  # (h, K, w)
            for begin in range(0, row_count, self.rows_per_tile):
                rows = slice(begin, begin + self.rows_per_tile)
                tile, source = self._upsampled(cells, rows)  # (rows, K, W)
                labels = self.labels[number, rows, None].long()
                label_logits = tile.gather(1, labels)
                highest = tile.amax(1, keepdim=True)
                tile = tile.softmax(1)
                losses[number, rows] = (highest - tile.amax(1, keepdim=True).log_() - label_logits).squeeze(1)
                if gradient is not None and shares is not None:
                    share = shares[number, rows, None]
                    tile.mul_(share).scatter_add_(1, labels, -share)
                    gradient[number, :, source] += self._downsampled(tile, rows, source).transpose(0, 1)
        return losses

    def _upsampled(self, cells: Tensor, rows: slice) -> tuple[Tensor, slice]:
        """Upsampled rows, (rows, K, W), from (h, K, w); and the rows of logits that they mix."""
        if self.down is None:
            source = rows
        else:
            last_row = min(rows.stop, self.labels.shape[1]) - 1
            first_source = int(_source(rows.start, *self.heights, self.align_corners))
            last_source = int(_source(last_row, *self.heights, self.align_corners)) + 1
            source = slice(max(0, first_source), min(last_source + 1, len(cells)))
        tile = cells[source]
        if self.across is not None:
            tile = tile @ self.across.T
        if self.down is not None:
            tile = (self.down[rows, source] @ tile.flatten(1)).unflatten(1, tile.shape[1:])
        return tile, source

    def _downsampled(self, tile: Tensor, rows: slice, source: slice) -> Tensor:
        """The transpose of `_upsampled`."""
        if self.down is not None:
            tile = (self.down[rows, source].T @ tile.flatten(1)).unflatten(1, tile.shape[1:])
        return tile if self.across is None else tile @ self.across


def _source(position: Any, old_size: int, new_size: int, align_corners: bool) -> Any:
    """Where a position among `new_size` lies among `old_size` cells; below 0 if before the first."""
    if align_corners:
        return position * ((old_size - 1) / max(new_size - 1, 1))
    return (position + 0.5) * old_size / new_size - 0.5


def _interpolation(old_size: int, new_size: int, align_corners: bool, like: Tensor) -> Tensor:
    """Linear interpolation of `old_size` cells to `new_size` positions, as a matrix (new_size, old_size)."""
    positions = torch.arange(new_size, dtype=torch.float64, device=like.device).unsqueeze(1)
    source = _source(positions, old_size, new_size, align_corners).clamp_(min=0)
    previous_cell = source.long().clamp_(max=old_size - 1)
    share = (source - previous_cell).to(like.dtype)  # of the next cell
    matrix = torch.zeros(new_size, old_size, dtype=like.dtype, device=like.device)
    matrix.scatter_(1, previous_cell, 1 - share)
    return matrix.scatter_add_(1, (previous_cell + 1).clamp_(max=old_size - 1), share)


@contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """Context without autocast and, on CUDA, without TF32 in matrix products."""
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        if device != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
            yield
            return
        # TF32 has two switches, and PyTorch raises an error if only one of them is on when the older one is read.
        try:
            older_switch = torch.get_float32_matmul_precision()
        except RuntimeError:  # only the newer one is on
            older_switch = None
        _allow_tf32(False, older_switch)
        try:
            yield
        finally:
            _allow_tf32(True, older_switch)


def _allow_tf32(allow: bool, older_switch: str | None) -> None:
    """Switch TF32 in CUDA's matrix products. `older_switch`: its value where TF32 is on; None if it is not used."""
    if older_switch is None:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allow else "ieee"
    elif allow and older_switch == "medium":
        torch.set_float32_matmul_precision(older_switch)
    else:
        torch.backends.cuda.matmul.allow_tf32 = allow
