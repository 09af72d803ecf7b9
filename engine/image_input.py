"""What the network gets to see of images, in training and evaluation."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from datasets.transforms import base_scale, scaled

Autocast = Callable[[], AbstractContextManager]  # a fresh autocast context for each forward pass


class ImageInput:
    """uint8 RGB images (N, 3, H, W) on any device -> normalised float32 ones on the network's device.

    Pixels travel as bytes and are normalised where the network is: (image / 255 - mean) / std. `base_size`: pixels of
    the longest side of whole images (those of the training are resized while they are cropped); None is their own.
    """

    def __init__(
        self,
        mean: list[float],
        std: list[float],
        device: torch.device,
        channels_last: bool,
        base_size: int | None = None,
    ):
        self.device = device
        self.mean = torch.tensor(mean, device=device).view(1, 3, 1, 1) * 255
        self.std = torch.tensor(std, device=device).view(1, 3, 1, 1) * 255
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.base_size = base_size

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return ((images - self.mean) / self.std).contiguous(memory_format=self.memory_format)

    def size(self, own_size: tuple[int, int], scale: float = 1.0) -> tuple[int, int]:
        """(H, W) at which the network sees a whole image of `own_size`, times `scale`."""
        return scaled(own_size, scale * base_scale(own_size, self.base_size))
