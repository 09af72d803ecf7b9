"""How many images of one size, or windows of one image, pass through the network at once."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.process.allocations import is_out_of_memory
from engine.process.console import logger
from engine.segmentation.inference import Views, resolution
from models.forward import Forward

_MOST_LOGITS = 2**28  # of a pass that is sized by pixels, at full resolution: 1 GiB in float32
_MOST_WAITING = 4  # batches' worth of images that wait for others of their size

T = TypeVar("T")


@dataclass
class AtOnce:
    """How many images of one size, or windows of one image, are in a pass; half of them whenever memory runs out."""

    images: int = 1  # or windows
    pixels: int | None = None  # of all images in a pass, at most, but at least one image; replaces `images`

    def fitting(self, forward: Forward, views: Views, size: tuple[int, int]) -> tuple[int, int]:
        """How many images of `size` (H, W) are predicted at once, and how many windows of each."""
        classes, _, grid = resolution(forward)
        region, windows = views.widest(size, grid)
        most = self.images
        if self.pixels is not None:
            most = max(1, min(self.pixels, _MOST_LOGITS // classes) // math.prod(region))
        images = max(1, most // windows)
        return images, min(windows, most // images)

    def attempts(
        self, forward: Forward, views: Views, batch: dict, predict: Callable[[dict, int], T]
    ) -> Iterator[tuple[dict, T]]:
        """Yield parts of a batch of images of one size, and what `predict(part, windows at once)` returns.

        It is called again with less if memory runs out. MemoryError: there is not enough for one image or window.
        """
        size = batch["image"].shape[2:]
        too_many = 0  # passes that were too many
        while batch["image"].shape[0]:
            images, windows = self.fitting(forward, views, size)
            part = {key: values[:images] for key, values in batch.items()}
            passes = len(part["image"]) * windows
            result = None
            try:
                result = predict(part, windows)
            except (MemoryError, RuntimeError) as error:
                if passes == 1 or not is_out_of_memory(error):
                    raise
            if result is None:  # the error is gone by now, and with it the tensors of its frames
                too_many = too_many or passes
                self.images = passes // 2
                if self.pixels is not None:
                    self.pixels = self.images * math.prod(views.widest(size, resolution(forward)[2])[0])
                continue
            if too_many:
                kind = f"images or windows of {size[0]}x{size[1]} pixels"
                logger.warning(f"out of memory with {too_many} {kind} at once: {passes} from now on")
                too_many = 0
            yield part, result
            batch = {key: values[images:] for key, values in batch.items()}


def of_equal_size(minibatches: Iterable[dict], most: Callable[[tuple[int, int]], int]) -> Iterator[dict]:
    """Join minibatches of single images, see `datasets.WholeImages`, to batches of `most(size)` images of one size.

    Few images wait for others, so batches may be smaller.
    """
    waiting: dict[tuple, list[dict]] = {}
    for minibatch in minibatches:
        size = minibatch["image"].shape[2:]
        key = (*size, "label" in minibatch)
        enough = most(size)
        waiting.setdefault(key, []).append(minibatch)
        if len(waiting[key]) >= enough:
            yield _joined(waiting.pop(key))
        elif sum(map(len, waiting.values())) >= _MOST_WAITING * enough:
            yield _joined(waiting.pop(max(waiting, key=lambda key: len(waiting[key]))))
    yield from map(_joined, waiting.values())


def _joined(minibatches: list[dict]) -> dict:
    if len(minibatches) == 1:
        return minibatches[0]
    columns = {key: [minibatch[key] for minibatch in minibatches] for key in minibatches[0]}
    return {key: torch.cat(parts) if isinstance(parts[0], Tensor) else sum(parts, []) for key, parts in columns.items()}
