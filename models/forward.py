"""uint8 images -> logits, the same way in training, evaluation, prediction and benchmarks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Forward:
    """Normalises images on the network's device and calls the network in the run's precision."""

    network: nn.Module  # normalised float32 images (N, C, H, W) -> logits
    mean: Tensor  # float32 (1, C, 1, 1), RGB in 0-255, on the network's device; `std` too
    std: Tensor
    memory_format: torch.memory_format  # of the normalised images
    autocast: Callable[[], AbstractContextManager]  # makes a fresh context for each pass
    overflow_advice: str = ""  # the end of a message about scores that are not finite
    memory_advice: str = ""  # the end of a message about an evaluation that needs too much memory

    def __call__(
        self, images: Tensor, size: tuple[int, int] | None = None, antialias: bool = True, **options: Any
    ) -> Tensor:
        """Logits of RGB images, or of another C, (N, C, H, W) with values 0-255, on any device.

        Images move to the network's device in their own dtype, usually uint8. They are resized bilinearly to `size`,
        an (H, W), if it is given; with `antialias`, images that shrink are smoothed like Pillow's. `options` go to
        the network.
        """
        inputs = self.normalised(images)
        if size not in (None, tuple(images.shape[-2:])):
            inputs = F.interpolate(inputs, size, mode="bilinear", antialias=antialias)
            inputs = inputs.contiguous(memory_format=self.memory_format)
        with self.autocast():
            return self.network(inputs, **options)

    def normalised(self, images: Tensor) -> Tensor:
        """(image - mean) / std, float32 on the network's device."""
        images = images.to(self.mean.device, non_blocking=True)
        return ((images - self.mean) / self.std).contiguous(memory_format=self.memory_format)

    def check_scores(self, unscored: int, total: int, noun: str) -> None:
        """FloatingPointError if some have no finite score: their class would be arbitrary. `noun`: pixels or images."""
        if unscored:
            raise FloatingPointError(f"{unscored:,} of {total:,} {noun} have no finite score; {self.overflow_advice}")

    def with_network(self, network: nn.Module) -> "Forward":
        """A copy of this for another network."""
        return replace(self, network=network)
