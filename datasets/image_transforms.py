"""Input of classification networks: random crops for training, centre crops and ten crops for evaluation.

Images are uint8 (H, W, 3) RGB; results may be views of three planes, (3, H, W). Resizing is bilinear, and antialiased
when it shrinks. Results differ from torchvision's on Pillow images by at most one level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch.nn.functional import interpolate

from datasets.colour_jitter import ColourJitter, Lighting

ColourChange = Callable[[np.ndarray, np.random.Generator], np.ndarray]

IMAGENET_COLOURS: tuple[ColourChange, ...] = (ColourJitter(brightness=0.4, contrast=0.4, saturation=0.4), Lighting(0.1))
_ATTEMPTS = 10  # of `RandomResizedCrop`


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of the image, resized to `size` x `size` pixels and mirrored with probability `flip`.

    This is the input of the released networks: Inception's crops (Szegedy et al. 2015). `scale`: range of the part's
    area, uniform, as a share of the image's. `ratio`: range of its width to height, log-uniform. If ten draws do not
    fit into the image, the part is the largest one in the middle with a ratio in that range. `colours` are applied in
    order to the crop.
    """

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    colours: tuple[ColourChange, ...] = IMAGENET_COLOURS

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """uint8 (H, W, 3) -> uint8 (size, size, 3)."""
        top, left, height, width = self.draw((image.shape[0], image.shape[1]), rng)
        crop = resized(image[top : top + height, left : left + width], (self.size, self.size))
        return _mirrored_and_recoloured(crop, self.flip, self.colours, rng)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw a part of an image of `size` (H, W): top, left, height, width in pixels."""
        image_height, image_width = size
        low, high = self.ratio
        for _ in range(_ATTEMPTS):
            area = image_height * image_width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= image_height and 0 < width <= image_width:
                top, left = (int(rng.integers(0, spare + 1)) for spare in (image_height - height, image_width - width))
                return top, left, height, width
        height = min(image_height, max(1, round(image_width / low)))
        width = min(image_width, max(1, round(image_height * high)))
        return (image_height - height) // 2, (image_width - width) // 2, height, width


@dataclass(frozen=True)
class ResizedRandomCrop:
    """The image with its short side resized to `resize`, a random crop of `size`, mirrored with probability `flip`.

    This is the paper's input (section 4.1). `colours` are applied in order to the crop.
    """

    resize: int = 256
    size: int = 224
    flip: float = 0.5
    colours: tuple[ColourChange, ...] = IMAGENET_COLOURS

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """uint8 (H, W, 3) -> uint8 (size, size, 3)."""
        image = short_side_resized(image, self.resize)
        top, left = (int(rng.integers(0, length - self.size + 1)) for length in image.shape[:2])
        crop = image[top : top + self.size, left : left + self.size]
        return _mirrored_and_recoloured(crop, self.flip, self.colours, rng)


@dataclass(frozen=True)
class PaddedCrop:
    """A random crop of `size` x `size` from the image padded by `padding` pixels, mirrored with probability `flip`.

    This is the usual input on CIFAR. `fill`: RGB (0-255) of the padding, by default CIFAR-10's mean; the network sees
    zeros if it is the mean of the normalisation.
    """

    size: int = 32
    padding: int = 4
    fill: tuple[float, float, float] = (125, 123, 114)
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
        pad, size = self.padding, self.size
        padded = np.empty((count, channels, height + 2 * pad, width + 2 * pad), pixels.dtype)
        padded[:] = np.array([round(value) for value in self.fill], pixels.dtype)[:, None, None]
        padded[..., pad : pad + height, pad : pad + width] = pixels
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))
        crops = windows[np.arange(count), :, corners[:, 0], corners[:, 1]]  # (n, 3, size, size)
        crops[mirrored] = crops[mirrored][..., ::-1]
        return crops


@dataclass(frozen=True)
class CentreCrop:
    """The image with its short side resized to `resize`, and its middle `crop` x `crop`."""

    resize: int = 256
    crop: int = 224

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W, 3) -> uint8 (crop, crop, 3)."""
        image = short_side_resized(image, self.resize)
        top, left = (round((length - self.crop) / 2) for length in image.shape[:2])
        return image[top : top + self.crop, left : left + self.crop]


@dataclass(frozen=True)
class TenCrops(CentreCrop):
    """The crops in the four corners and the middle of the resized image, then the same five of its mirror image."""

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W, 3) -> uint8 (10, crop, crop, 3)."""
        image = short_side_resized(image, self.resize)
        bottom, right = (length - self.crop for length in image.shape[:2])
        corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), (round(bottom / 2), round(right / 2))]
        views = (image, image[:, ::-1])
        crops = [view[top : top + self.crop, left : left + self.crop] for view in views for top, left in corners]
        return np.stack([crop.transpose(2, 0, 1) for crop in crops]).transpose(0, 2, 3, 1)


def short_side_resized(image: np.ndarray, length: int) -> np.ndarray:
    """Resize an image's short side to `length` pixels; the long side is rounded down, as torchvision's Resize does."""
    height, width = image.shape[:2]
    short = min(height, width)
    return resized(image, (length * height // short, length * width // short))


def resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 (H, W, 3) -> uint8 (h, w, 3) of `size`."""
    if image.shape[:2] == size:
        return image
    if image.shape[0] <= size[0] and image.shape[1] <= size[1]:  # nothing shrinks: OpenCV takes a third of the time
        return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
    batch = torch.from_numpy(image).permute(2, 0, 1)[None]  # (1, 3, H, W)
    planes = interpolate(batch, size, mode="bilinear", antialias=True)[0]
    return planes.numpy().transpose(1, 2, 0)


def _mirrored_and_recoloured(
    crop: np.ndarray, flip: float, colours: Sequence[ColourChange], rng: np.random.Generator
) -> np.ndarray:
    if rng.random() < flip:
        planes = np.ascontiguousarray(crop.transpose(2, 0, 1))
        crop = cv2.flip(planes.reshape(-1, planes.shape[2]), 1).reshape(planes.shape).transpose(1, 2, 0)
    for change in colours:
        crop = change(crop, rng)
    return crop
