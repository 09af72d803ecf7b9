"""Input of classification networks: torchvision's transforms of images in files, and crops of images in memory.

Images are uint8 tensors (3, H, W) RGB. Resizing is bilinear, and antialiased when it shrinks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Eigenvalues and eigenvectors (columns) of the covariance of ImageNet's RGB values in 0-1. Source: fb.resnet.torch.
_EIGENVALUES = torch.tensor([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])

Transform = Callable[[Tensor], Tensor]  # random ones draw from torch's global generator


def random_crops(size: int = 224, resize: int | None = None, flip: float = 0.5) -> Transform:
    """Training input: a random crop (3, size, size), mirrored with probability `flip`, with changed colours.

    `resize`: resize the short side to this length before cropping, as in the paper (section 4.1). None: Inception's
    crops (Szegedy et al. 2015), as in the release; see torchvision's RandomResizedCrop. Colours are changed by
    torchvision's ColorJitter of 0.4 and by `lighting`.
    """
    from torchvision.transforms import v2  # takes as long to import as torch, and few runs need it

    crop = [v2.RandomResizedCrop(size)] if resize is None else [v2.Resize(resize), v2.RandomCrop(size)]
    return v2.Compose([*crop, v2.RandomHorizontalFlip(flip), v2.ColorJitter(0.4, 0.4, 0.4), lighting])


def colour_jitter(**strengths: float) -> Transform:
    """torchvision's ColorJitter: brightness, contrast, saturation and hue, in random order."""
    from torchvision.transforms import v2

    return v2.ColorJitter(**strengths)


def fixed_crops(resize: int = 256, size: int = 224, ten: bool = False) -> Transform:
    """Evaluation input: the centre crop (3, size, size) of the image with its short side resized to `resize`.

    `ten`: the corner and centre crops of the image, then of its mirror image: (10, 3, size, size).
    """
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(resize), *([v2.TenCrop(size), torch.stack] if ten else [v2.CenterCrop(size)])])


def lighting(image: Tensor, strength: float = 0.1) -> Tensor:
    """AlexNet's lighting noise (Krizhevsky et al. 2012): adds the same random RGB shift to all pixels.

    The shift is a sum of ImageNet's principal colours, each times its eigenvalue and a normal number of standard
    deviation `strength`. Results are rounded to whole levels and clipped to 0 and 255.
    """
    shift = 255 * _EIGENVECTORS @ (_EIGENVALUES * torch.randn(3) * strength)
    return (image + shift[:, None, None]).round_().clamp_(0, 255).to(torch.uint8)


def seeded(transform: Transform, image: Tensor, seed: int) -> Tensor:
    """`transform(image)` with the random numbers of `seed`; torch's global generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return transform(image)


@dataclass(frozen=True)
class PaddedCrop:
    """A random crop of `size` x `size` from the image padded by `padding` pixels, mirrored with probability `flip`.

    This is the usual input on CIFAR. `fill`: RGB (0-255) of the padding, by default CIFAR-10's mean; the network sees
    zeros if it is the mean of the normalisation.
    """

    size: int = 32
    padding: int = 4
    fill: tuple[float, ...] = (125, 123, 114)
    flip: float = 0.5

    def draw(self, size: Sequence[int], images: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw crops of n=`images` images of `size` (H, W): top and left after padding, int64 (n, 2); flips (n,).

        ValueError: the images are smaller than a crop.
        """
        spare = [length + 2 * self.padding - self.size for length in size]
        if min(spare) < 0:
            raise ValueError(
                f"size={self.size} is larger than images of {size[1]}x{size[0]} pixels with padding={self.padding}; "
                "expected a crop that fits, so take a smaller one or more padding"
            )
        return rng.integers(0, np.add(spare, 1), (images, 2)), rng.random(images) < self.flip

    def minibatch(self, pixels: np.ndarray, corners: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
        """Crop images at `corners`: (n, 3, H, W) -> (n, 3, size, size) of the same dtype. Arguments as from `draw`."""
        count, channels, height, width = pixels.shape
        pad = self.padding
        padded = np.empty((count, channels, height + 2 * pad, width + 2 * pad), pixels.dtype)
        padded[:] = np.array([round(value) for value in self.fill], pixels.dtype)[:, None, None]
        padded[..., pad : pad + height, pad : pad + width] = pixels
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.size, self.size), axis=(2, 3))
        crops = windows[np.arange(count), :, corners[:, 0], corners[:, 1]]  # (n, 3, size, size)
        crops[mirrored] = crops[mirrored][..., ::-1]
        return crops
