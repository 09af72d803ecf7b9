"""Predict whole images: in one pass or in overlapping windows, at one scale or several, optionally mirrored.

Class scores at full resolution can fill gigabytes (20 megapixels, 65 classes: 5 GB). If there are many, or with windows
or several views, logits are kept at the network's resolution (one cell per `output_stride` pixels: 81 MB), and
interpolated for a few rows of pixels at a time. A cell covers exactly that many pixels of the image that the network
sees, also at edges that cut it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.transforms import base_scale, scale_size
from engine.process.allocations import memory_errors
from models.forward import Forward
from models.segmentation import EXACT, STRETCHED, SegmentationNetwork, upsampled

_MOST_SCORES = 2**26  # class scores of a single pass; more are interpolated in parts
# Class scores in a part, at full resolution, in float32: 32 MiB. (With 64 MiB, CPUs take 1.6 of the time.)
_SCORES_AT_ONCE = 2**23


@dataclass(frozen=True)
class Views:
    """Sizes, windows and orientations in which the network sees an image."""

    base_size: int | None = None  # pixels of the longest side at scale 1; None: the image's own size
    antialias: bool = True  # smooth where an image shrinks, as Pillow does when it resizes
    # Side of the square windows in pixels, at the resolution that the network sees; a multiple of its output stride.
    # Logits are averaged where windows overlap. None, or an image that fits: one pass over the whole image.
    window: int | None = None
    overlap: float = 0.25  # smallest share of a window's side that the next window also covers, in [0, 1)
    scales: tuple[float, ...] = (1.0,)  # one view each; the softmax is averaged over the views
    flip: bool = False  # add a copy of every view, mirrored left to right
    upsampling: str = EXACT  # or "stretched", see `SegmentationNetwork`

    def size(self, own_size: tuple[int, int], scale: float = 1.0) -> tuple[int, int]:
        """(H, W) at which the network sees an image of `own_size` at a scale."""
        return scale_size(own_size, scale * base_scale(own_size, self.base_size))

    def is_single_pass(self, size: tuple[int, int]) -> bool:
        """Whether an image of (H, W) pixels takes a single forward pass."""
        return self.scales == (1.0,) and not self.flip and (self.window is None or max(size) <= self.window)

    def widest(self, own_size: tuple[int, int], stride: int) -> tuple[tuple[int, int], int]:
        """(H, W) of the largest part of an image that takes a single pass, and how many such parts lie side by side."""
        height, width = self.size(own_size, max(self.scales))
        if self.window is None:
            return (height, width), 1
        starts = _starts(math.ceil(width / stride), math.ceil(self.window / stride), self.overlap)
        return (min(height, self.window), min(width, self.window)), len(starts)

    def count(self) -> int:
        """How many views there are of an image."""
        return len(self.scales) * (1 + self.flip)

    def options(self) -> dict:
        """Arguments of the network besides images."""
        return {} if self.upsampling == EXACT else {"upsampling": self.upsampling}

    def covered(self, seen: Sequence[int], size: Sequence[int], stride: int) -> Sequence[float]:
        """How much of `size` (H, W) the cells of a view of `seen` pixels cover: at least all of it."""
        if self.upsampling == STRETCHED:
            return size
        return [math.ceil(pixels / stride) * stride * side / pixels for pixels, side in zip(seen, size, strict=True)]

    def record(self) -> dict:
        """The fields for results.json; base_size and antialias are in its configuration."""
        views = {"window": self.window, "overlap": self.overlap, "scales": list(self.scales), "flip": self.flip}
        return views | self.options()


WHOLE_IMAGE = Views()


def predict(
    forward: Forward,
    images: Tensor,
    views: Views = WHOLE_IMAGE,
    *,
    probabilities: bool = False,
    unscored: Tensor | None = None,
    windows: int = 1,
    on_probabilities: Callable[[Tensor, slice], None] | None = None,
) -> Tensor:
    """Predict train ids, uint8 (N, H, W) on the network's device, for uint8 images (N, C, H, W).

    Predictions are resized to the images (nearest pixel).

    Args:
        forward: of a `models.segmentation.SegmentationNetwork`, which is put into eval mode.
        probabilities: return the probability of every class at every pixel instead, float32 (N, classes, H, W).
        unscored: int64 (2,) on the network's device; the number of pixels (of the sizes that the network sees) without
            a finite score is added to the first value, the number of all to the second.
        windows: how many windows side by side pass through the network at once, if they have one size.
        on_probabilities: is called with the probabilities of some rows of all images, float32 (N, classes, rows, W),
            and with these rows, from top to bottom.

    MemoryError: the device does not have enough memory for these images.
    """
    network: Any = forward.network.eval()
    count, _, height, width = images.shape
    size = views.size((height, width))
    pixels = f"{height}x{width} pixels"
    when = f"an image of {pixels} was evaluated" if count == 1 else f"{count} images of {pixels} were evaluated"
    with memory_errors(f"while {when}. {forward.memory_advice}"), torch.inference_mode():
        top = 0
        predicted = []
        for scores in _scores(forward, images, size, views, windows):
            predicted.append(_predicted_rows(network, scores, views, probabilities, unscored))
            if on_probabilities is not None:
                on_probabilities(*_resized_rows(_mean_softmax(scores, views), top, size, (height, width)))
            top += scores.shape[2]
        del scores  # all of a single pass
        predictions = predicted[0] if len(predicted) == 1 else torch.cat(predicted, dim=2)
        if size != (height, width):
            predictions = F.interpolate(predictions, (height, width), mode="nearest-exact")
        return predictions if probabilities else predictions[:, 0]


def _predicted_rows(network: Any, scores: Tensor, views: Views, probabilities: bool, unscored: Tensor | None) -> Tensor:
    """Probabilities (N, classes, rows, W) of some rows, or their train ids (N, 1, rows, W), from `_scores`.

    `unscored`: see `predict`.
    """
    highest, classes = scores.max(dim=1, keepdim=True)
    if unscored is not None:
        unscored[0] += highest.isfinite().logical_not_().sum()
        unscored[1] += highest.numel()
    if probabilities:
        return _mean_softmax(scores, views)
    if hasattr(getattr(network, "head", None), "decide"):
        classes = network.decide(scores if views.count() == 1 else _mean_softmax(scores, views).log())[:, None]
    return classes.to(torch.uint8)


def _mean_softmax(scores: Tensor, views: Views) -> Tensor:
    """The probabilities of `_scores`."""
    return scores.softmax(dim=1) if views.count() == 1 else scores / views.count()


def _resized_rows(scores: Tensor, top: int, size: tuple[int, int], to_size: tuple[int, int]) -> tuple[Tensor, slice]:
    """Scores (N, classes, rows, W) of the rows from `top` on at `size`, resized as predictions are, and their rows."""
    if size == to_size:
        return scores, slice(top, top + scores.shape[2])
    rows, columns = (
        F.interpolate(torch.arange(float(pixels)).view(1, 1, -1), to_pixels, mode="nearest-exact").flatten().long()
        for pixels, to_pixels in zip(size, to_size, strict=True)
    )
    first, last = (int((rows < row).sum()) for row in (top, top + scores.shape[2]))
    rows = (rows[first:last] - top).to(scores.device)
    columns = columns.to(scores.device)
    return scores.index_select(2, rows).index_select(3, columns), slice(first, last)


def _scores(
    forward: Forward, images: Tensor, size: tuple[int, int], views: Views, windows_per_pass: int
) -> Iterator[Tensor]:
    """Scores at `size`, some rows at a time: logits (N, classes, rows, W), or the summed softmaxes of several views."""
    classes, stride, _ = resolution(forward)
    value_count = len(images) * classes * math.prod(math.ceil(side / stride) * stride for side in size)
    if views.is_single_pass(size) and value_count <= _MOST_SCORES:
        yield forward(images, size=size, antialias=views.antialias, **views.options())
    elif views.is_single_pass(size) and views.upsampling == EXACT:
        yield from _scores_of_single_pass(forward, images, size, views)
    else:
        yield from _scores_of_views(forward, images, size, views, windows_per_pass)


def _scores_of_single_pass(forward: Forward, images: Tensor, size: tuple[int, int], views: Views) -> Iterator[Tensor]:
    """Logits (N, classes, rows, W) of a single pass at `size`, some rows at a time, bitwise the network's own."""
    cells = forward(images, size=size, antialias=views.antialias, cells=True)
    count, classes, height, width = cells.shape
    _, stride, _ = resolution(forward)
    rows = max(1, _SCORES_AT_ONCE // (count * classes * width * stride**2))  # of cells
    for top in range(0, height, rows):
        first = max(0, top - 1)  # bilinear: the first pixels of these rows also depend on the cell above
        pixels = upsampled(cells[:, :, first : top + rows + 1], (size[0] - first * stride, size[1]), stride)
        yield pixels[:, :, (top - first) * stride : (top + rows - first) * stride]


def _scores_of_views(
    forward: Forward, images: Tensor, size: tuple[int, int], views: Views, windows_per_pass: int
) -> Iterator[Tensor]:
    """Like `_scores`, of any views and windows."""
    images = images.to(forward.mean.device, non_blocking=True)
    orientations = [images, images.flip(3)] if views.flip else [images]
    own_size = (images.shape[-2], images.shape[-1])
    _, stride, _ = resolution(forward)
    seen = [(pixels, views.size(own_size, scale)) for scale in views.scales for pixels in orientations]
    logits = [_logits_of_view(forward, pixels, seen_size, views, windows_per_pass) for pixels, seen_size in seen]
    covered = [views.covered(seen_size, size, stride) for _, seen_size in seen]
    rows_at_once = max(1, _SCORES_AT_ONCE // (len(images) * logits[0].shape[1] * size[1]))
    for top in range(0, size[0], rows_at_once):
        rows = range(top, min(top + rows_at_once, size[0]))
        parts = (
            _upsampled_rows(cells, rows, size[1], pixels, mirrored=views.flip and number % 2 == 1)
            for number, (cells, pixels) in enumerate(zip(logits, covered, strict=True))
        )
        scores = next(parts)  # (N, classes, rows, W)
        if len(logits) > 1:
            scores = scores.softmax(dim=1)
            for part in parts:
                scores += part.softmax(dim=1)  # the sum has the argmax of the mean
        yield scores


def resolution(forward: Forward) -> tuple[int, int, int]:
    """The network's number of classes, its logits' stride, and the pixels of which sides of windows are multiples.

    1 for a module that is no `SegmentationNetwork`.
    """
    network = forward.network
    return (network.classes, network.stride, network.grid) if isinstance(network, SegmentationNetwork) else (1, 1, 1)


def _logits_of_view(
    forward: Forward, images: Tensor, size: tuple[int, int], views: Views, windows_per_pass: int
) -> Tensor:
    """Logits of `images` (N, C, H, W) seen at `size`, float32 (N, classes, h, w) at the network's resolution.

    `windows_per_pass`: of equal size.
    """
    classes, stride, grid = resolution(forward)
    window = math.ceil((views.window or max(size)) / stride)
    axes = (windows_along(math.ceil(side / stride), window, views.overlap, grid // stride) for side in size)
    rows, columns = (  # copied to the device without waiting for it
        [(first, weights.to(images.device, non_blocking=True)) for first, weights in axis] for axis in axes
    )
    height, width = (math.ceil(side / stride) for side in size)
    sums = torch.zeros(len(images), classes, height, width, device=images.device)
    for top, row_weights in rows:
        strip = torch.zeros(len(images), classes, len(row_weights), width, device=images.device)
        down = range(top * stride, min((top + len(row_weights)) * stride, size[0]))  # edges may cut windows
        across = [range(left * stride, min((left + len(weights)) * stride, size[1])) for left, weights in columns]
        for first, end in _passes(across, windows_per_pass):
            regions = [resized_region(images, size, down, pixels, views.antialias) for pixels in across[first:end]]
            logits = forward(torch.cat(regions), cells=True, **views.options()).chunk(len(regions))
            for (left, column_weights), cells in zip(columns[first:end], logits, strict=True):
                strip[..., left : left + len(column_weights)] += cells * column_weights  # in float32
        sums[:, :, top : top + len(row_weights)] += strip * row_weights[:, None]
    return sums


def _passes(windows: Sequence[range], most: int) -> Iterator[tuple[int, int]]:
    """(first window, end) of each pass over windows side by side: `most` of them, but all of one size.

    Only the last window may be cut by the image's edge; then it passes alone.
    """
    whole_count = sum(len(window) == len(windows[0]) for window in windows)
    for first in range(0, whole_count, most):
        yield first, min(first + most, whole_count)
    if whole_count < len(windows):
        yield whole_count, len(windows)


def _upsampled_rows(logits: Tensor, rows: range, width: int, covered: Sequence[float], mirrored: bool) -> Tensor:
    """Rows of upsampled logits (N, classes, h, w), cut to `width` pixels and mirrored back: (N, classes, rows, width).

    covered: height and width in pixels that the cells cover, at least the image's.
    """
    taps = _taps(rows, logits.shape[2], logits.shape[2] / covered[0], logits.device)
    cells = taps.blend(logits[:, :, taps.first : taps.last + 1], dim=2)  # (N, classes, rows, w)
    if covered[1] == width:
        return F.interpolate(cells.flip(3) if mirrored else cells, (len(rows), width), mode="bilinear")
    scale = (1.0, covered[1] / cells.shape[3])  # an output beyond the image is cut off before it is mirrored
    pixels = F.interpolate(cells, scale_factor=scale, mode="bilinear", recompute_scale_factor=False)[..., :width]
    return pixels.flip(3) if mirrored else pixels


def windows_along(cells: int, window: int, overlap: float, step: int = 1) -> list[tuple[int, Tensor]]:
    """Place windows along one axis: the first cell and the weights, float32 (window,), of each.

    Uses the fewest windows that overlap by at least `overlap`, spread evenly from the first cell to the last. Weights
    rise and fall linearly where windows overlap, and sum to 1 in every cell. Windows begin at multiples of `step` cells
    and have as many; the last may be cut.
    """
    steps = math.ceil(cells / step)
    steps_per_window = min(math.ceil(window / step), steps)
    starts = [step * start for start in _starts(steps, steps_per_window, overlap)]
    window = step * steps_per_window
    apart = max((after - before for before, after in zip(starts, starts[1:], strict=False)), default=window)
    rise = torch.arange(1.0, window + 1)
    weights = torch.minimum(rise, rise.flip(0)).clamp(max=window - apart + 1)
    total = torch.zeros(cells)
    for start in starts:
        total[start : start + window] += weights[: cells - start]
    return [(start, weights[: cells - start] / total[start : start + window]) for start in starts]


def _starts(cells: int, window: int, overlap: float) -> list[int]:
    """The first cell of each window along an axis."""
    window = min(window, cells)
    steps = math.ceil((cells - window) / max(1, int(window * (1 - overlap))))
    return [(cells - window) * step // max(1, steps) for step in range(steps + 1)]


def resized_region(images: Tensor, size: tuple[int, int], rows: range, columns: range, antialias: bool) -> Tensor:
    """Compute only a region of `F.interpolate(images, size, mode="bilinear", antialias=antialias)`, float32.

    images: (N, C, H, W) of any dtype. If they already have that size, their pixels are returned in their own dtype.
    """
    if tuple(images.shape[-2:]) == size:
        return images[..., rows.start : rows.stop, columns.start : columns.stop]
    down, across = (
        _taps(pixels, images.shape[dim], images.shape[dim] / size[dim], images.device, antialias)
        for dim, pixels in ((-2, rows), (-1, columns))
    )
    images = images[..., down.first : down.last + 1, across.first : across.last + 1].float()
    return across.blend(down.blend(images, dim=2), dim=3)


@dataclass(frozen=True)
class _Taps:
    """The source pixels that each pixel of a bilinear resize averages, along one axis."""

    first: int  # source pixel used
    last: int
    sources: Tensor  # int64 (taps, pixels), relative to `first`
    weights: Tensor  # float32 (taps, pixels); each pixel's sum to 1

    def blend(self, values: Tensor, dim: int) -> Tensor:
        """Average `values`, the source pixels from `first` to `last`, float32 (N, C, H, W)."""
        weights = self.weights[..., None] if dim == 2 else self.weights
        total = values.index_select(dim, self.sources[0]) * weights[0]
        for sources, weight in zip(self.sources[1:], weights[1:], strict=True):
            total.addcmul_(values.index_select(dim, sources), weight)
        return total


def _taps(pixels: range, source_length: int, step: float, device: torch.device, antialias: bool = False) -> _Taps:
    """What F.interpolate averages for some `pixels` of an axis that it resizes, computed as it does.

    `source_length`: pixels of the axis before. `step`: how many of them a pixel covers after.
    """
    # On the host, which needs `first` and `last`: reading them from the device would wait for it.
    reach = max(1.0, step) if antialias else 1.0  # weights fall linearly to 0 at this distance
    positions = (np.arange(pixels.start, pixels.stop, dtype=np.float32) + 0.5) * step - 0.5
    sources = np.floor(positions - reach).astype(np.int64) + 1 + np.arange(math.ceil(2 * reach))[:, None]
    weights = (1 - abs(sources - positions) / reach).clip(min=0) * ((sources >= 0) & (sources < source_length))
    weights = (weights / weights.sum(axis=0)).astype(np.float32)
    sources = sources.clip(0, source_length - 1)  # (taps, pixels)
    first = int(sources[0, 0])
    copies = (torch.from_numpy(array).to(device, non_blocking=True) for array in (sources - first, weights))
    return _Taps(first, int(sources[-1, -1]), *copies)
