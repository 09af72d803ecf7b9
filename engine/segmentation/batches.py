"""How images pass through the network: how many of one size, or windows of one image, at once."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.process.allocations import is_out_of_memory
from engine.process.console import logger
from engine.segmentation.inference import WHOLE_IMAGE, Views, resolution
from models.forward import Forward

_MOST_LOGITS = 2**28  # of a pass that is sized by pixels, at full resolution: 1 GiB in float32
_MOST_WAITING = 4  # batches' worth of images that wait for others of their size

T = TypeVar("T")


@dataclass
class AtOnce:
    """How many images of one size, or windows of one image, are in a pass; half of them whenever memory runs out."""

    images: int = 1  # or windows
    pixels: int | None = None  # of all images in a pass, at most, but at least one image; replaces `images`
    views: Views = WHOLE_IMAGE  # of each image

    def counts_per_pass(self, forward: Forward, size: tuple[int, int]) -> tuple[int, int]:
        """How many images of `size` (H, W) are predicted at once, and how many windows of each."""
        classes, _, grid = resolution(forward)
        region, windows = self.views.widest(size, grid)
        most = self.images
        if self.pixels is not None:
            most = max(1, min(self.pixels, _MOST_LOGITS // classes) // math.prod(region))
        images = max(1, most // windows)
        return images, min(windows, most // images)

    def predict_parts(
        self, forward: Forward, batch: dict, predict: Callable[[dict, int], T]
    ) -> Iterator[tuple[dict, T]]:
        """Yield parts of a batch of images of one size, and what `predict(part, windows at once)` returns.

        It is called again with less if memory runs out. MemoryError: there is not enough for one image or window.
        """
        size = batch["image"].shape[2:]
        first_failed_count = 0  # images or windows of the first pass for which memory did not suffice
        while batch["image"].shape[0]:
            image_count, window_count = self.counts_per_pass(forward, size)
            part = {key: values[:image_count] for key, values in batch.items()}
            count = len(part["image"]) * window_count
            prediction = None
            try:
                prediction = predict(part, window_count)
            except (MemoryError, RuntimeError) as error:
                if count == 1 or not is_out_of_memory(error):
                    raise
            if prediction is None:  # the error is gone by now, and with it the tensors of its frames
                first_failed_count = first_failed_count or count
                self._limit(count // 2, forward, size)
                continue
            if first_failed_count:
                kind = f"images or windows of {size[0]}x{size[1]} pixels"
                logger.warning(f"out of memory with {first_failed_count} {kind} at once: {count} from now on")
                first_failed_count = 0
            yield part, prediction
            batch = {key: values[image_count:] for key, values in batch.items()}

    def _limit(self, count: int, forward: Forward, size: tuple[int, int]) -> None:
        """From now on, at most `count` images of `size` or windows, or as many pixels, are in a pass."""
        self.images = count
        if self.pixels is not None:
            region, _ = self.views.widest(size, resolution(forward)[2])
            self.pixels = count * math.prod(region)


def batches_of_equal_size(minibatches: Iterable[dict], most: Callable[[tuple[int, int]], int]) -> Iterator[dict]:
    """Join minibatches of single images, see `datasets.WholeImages`, to batches of `most(size)` images of one size.

    Few images wait for others, so batches may be smaller.
    """
    waiting: dict[tuple, list[dict]] = {}
    for minibatch in minibatches:
        size = minibatch["image"].shape[2:]
        kind = (*size, "label" in minibatch)
        batch_size = most(size)
        waiting.setdefault(kind, []).append(minibatch)
        if len(waiting[kind]) >= batch_size:
            yield _join(waiting.pop(kind))
        elif sum(map(len, waiting.values())) >= _MOST_WAITING * batch_size:
            commonest_kind = max(waiting, key=lambda kind: len(waiting[kind]))
            yield _join(waiting.pop(commonest_kind))
    yield from map(_join, waiting.values())


def _join(minibatches: list[dict]) -> dict:
    """One batch of the tensors and the lists of several minibatches."""
    if len(minibatches) == 1:
        return minibatches[0]
    columns = {key: [minibatch[key] for minibatch in minibatches] for key in minibatches[0]}
    return {key: torch.cat(parts) if isinstance(parts[0], Tensor) else sum(parts, []) for key, parts in columns.items()}
