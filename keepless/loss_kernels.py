"""Losses of upsampled logits, and their gradient, in one Triton kernel each: no tile is ever in memory.

Both interpolate the logits of a pixel from its four cells, class after class. The gradient of a cell is the sum over
the pixels that read the cell, always in the same order, without atomics: each pixel is computed for up to four cells.

Arithmetic is float32. Logits have any strides, and at most 2^31 elements per image.
"""

# Triton takes a kernel's annotations as types to compile for, so only compile-time constants have one.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 256  # of a row, per program
CELLS, CLASSES = 64, 4  # of a row of logits, per program


@triton.jit
def _interpolated(corner, below, right, below_right, row_share, share, mask):
    """Bilinear interpolation between four cells, given by pointers."""
    corner, right = tl.load(corner, mask, 0.0).to(tl.float32), tl.load(right, mask, 0.0).to(tl.float32)
    below, below_right = tl.load(below, mask, 0.0).to(tl.float32), tl.load(below_right, mask, 0.0).to(tl.float32)
    above = corner * (1 - share) + right * share
    return above * (1 - row_share) + (below * (1 - share) + below_right * share) * row_share


@triton.jit
def _losses_kernel(
    logits, labels, rows, row_shares, columns, column_shares, losses, normalisers,
    stride_n, stride_k, stride_h, stride_w, K, h, w, H, W, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK pixels of a row. Writes -log softmax of the label's class, and the classes' log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    n, y = row // H, row % H
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = x < W
    upper, row_share = tl.load(rows + y), tl.load(row_shares + y)
    left, share = tl.load(columns + x, mask, 0), tl.load(column_shares + x, mask, 0.0)
    lower, right = tl.minimum(upper + 1, h - 1), tl.minimum(left + 1, w - 1)
    label = tl.load(labels + row * W + x, mask, 0).to(tl.int32)
    image = logits + n * stride_n
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    own = tl.full((BLOCK,), float("nan"), tl.float32)  # the loss of a label that is no class
    for k in range(0, K):
        above, below = image + k * stride_k + upper * stride_h, image + k * stride_k + lower * stride_h
        value = _interpolated(
            above + left * stride_w, below + left * stride_w, above + right * stride_w, below + right * stride_w,
            row_share, share, mask,
        )  # fmt: skip
        own = tl.where(label == k, value, own)
        higher = tl.maximum(highest, value)
        total = total * tl.exp(highest - higher) + tl.exp(value - higher)
        highest = higher
    normaliser = highest + tl.log(total)
    tl.store(normalisers + row * W + x, normaliser, mask)
    tl.store(losses + row * W + x, normaliser - own, mask)


@triton.jit
def _gradient_kernel(
    logits, labels, normalisers, shares, rows, row_shares, row_begins, row_ends, columns, column_shares,
    column_begins, column_ends, gradient, stride_n, stride_k, stride_h, stride_w,
    gradient_n, gradient_k, gradient_h, gradient_w, K, h, w, H, W, MOST,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_K classes of BLOCK cells in a row. MOST: pixels of a row that read one cell, at most."""
    cells = tl.program_id(0).to(tl.int64)
    n, i = cells // h, (cells % h).to(tl.int32)
    j = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    k = (tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    begin, end = tl.load(column_begins + j, j < w, 0), tl.load(column_ends + j, j < w, 0)
    image = logits + n * stride_n + k * stride_k
    total = tl.full((BLOCK_K, BLOCK), 0.0, tl.float32)
    for y in range(tl.load(row_begins + i), tl.load(row_ends + i)):
        upper, row_share = tl.load(rows + y), tl.load(row_shares + y)
        lower = tl.minimum(upper + 1, h - 1)
        of_row = tl.where(upper == i, 1 - row_share, 0.0) + tl.where(lower == i, row_share, 0.0)
        above, below = image + upper * stride_h, image + lower * stride_h
        for step in range(0, MOST):
            x = begin + step
            inside = x < end
            mask = inside & (k < K)
            left, share = tl.load(columns + x, inside, 0), tl.load(column_shares + x, inside, 0.0)
            right = tl.minimum(left + 1, w - 1)
            of_column = tl.where(left == j, 1 - share, 0.0) + tl.where(right == j, share, 0.0)
            value = _interpolated(
                above + left * stride_w, below + left * stride_w, above + right * stride_w, below + right * stride_w,
                row_share, share, mask,
            )  # fmt: skip
            pixel = (n * H + y) * W + x
            probability = tl.exp(value - tl.load(normalisers + pixel, inside, 0.0))
            own = tl.where(tl.load(labels + pixel, inside, 0).to(tl.int32) == k, 1.0, 0.0)
            weight = tl.load(shares + pixel, inside, 0.0) * of_row * of_column
            total += tl.where(mask, (probability - own) * weight, 0.0)
    place = gradient + n * gradient_n + k * gradient_k + i * gradient_h + j * gradient_w
    tl.store(place, total, (k < K) & (j < w))


Sources = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def losses_and_normalisers(logits: Tensor, labels: Tensor, sources: Sources) -> tuple[Tensor, Tensor]:
    """-log softmax of each pixel's label, and the log of the sum of exponentials over the classes, float32 (N, H, W).

    Args:
        logits: (N, K, h, w), float32, bfloat16 or float16, any strides.
        labels: (N, H, W), contiguous, any integer dtype; classes alone.
        sources: of the rows and of the columns: for each position, the cell before it and the next cell's share.
    """
    n, k, h, w = logits.shape
    height, width = labels.shape[1:]
    losses, normalisers = (torch.empty(labels.shape, dtype=torch.float32, device=labels.device) for _ in range(2))
    vectors = [vector for source in sources for vector in source]
    _losses_kernel[n * height, triton.cdiv(width, PIXELS)](
        logits, labels, *vectors, losses, normalisers, *logits.stride(), k, h, w, height, width, BLOCK=PIXELS
    )
    return losses, normalisers


def write_gradient(
    gradient: Tensor, logits: Tensor, labels: Tensor, normalisers: Tensor, shares: Tensor, sources: Sources
) -> None:
    """Write the gradient of the losses' sum, weighted by `shares`, to a float32 tensor like the logits."""
    n, k, h, w = logits.shape
    height, width = labels.shape[1:]
    vectors = []
    for (before, share), size in zip(sources, (h, w), strict=True):
        cells = torch.arange(size, device=before.device)
        begins, ends = torch.searchsorted(before, cells - 1), torch.searchsorted(before, cells, right=True)
        vectors += [before, share, begins, ends]
    most = 2 * triton.cdiv(width, w) + 2
    _gradient_kernel[n * h, triton.cdiv(w, CELLS), triton.cdiv(k, CLASSES)](
        logits, labels, normalisers, shares, *vectors, gradient, *logits.stride(), *gradient.stride(),
        k, h, w, height, width, most, BLOCK_K=CLASSES, BLOCK=CELLS,
    )  # fmt: skip
