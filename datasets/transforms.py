"""The paper's training augmentation (section 4.2): flip with probability 0.5, scale in 0.7-2.0, then crop.

Scaling and cropping are one step, which computes only the pixels of the crop. The result equals resizing the whole
image and then cropping it, because the crop keeps its sub-pixel position: pixel centres lie at half-integers, so pixel
x of the scaled image is at (x + 0.5) * W / scaled_W - 0.5 in the original. An image that shrinks to about half its size
or less is first averaged over blocks of pixels, which start at the image's first pixel whatever the crop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch

from datasets.class_table import IGNORED
from datasets.image_transforms import Transform, seeded
from datasets.segmentation import Undecoded

Pixels = np.ndarray | Undecoded


class WrongPixel(Exception):
    """An image or its label does not have the pixel of a class that a crop was asked for."""


@dataclass
class TrainingTransform:
    """A random crop of a randomly scaled and flipped image, with its label.

    `crop_size`: (height, width) in pixels. `scale`: range of the uniform scale factor. `flip`: probability of
    mirroring left to right. `base_size`: length of the image's longest side at scale 1, in pixels; None keeps its size.
    `fill`: the channels (0-255) of padding around a scaled image that is smaller than the crop; if it is the mean of
    the normalisation, the network sees zeros. The padding is ignored in the label. `colour_jitter` changes the
    colours of the scaled image (uint8 (3, H, W)), but not the padding. `antialias`: see `scale_and_crop`.
    """

    crop_size: tuple[int, int]
    scale: tuple[float, float] = (0.7, 2.0)
    flip: float = 0.5
    base_size: int | None = None
    fill: tuple[float, ...] = (124, 116, 104)
    colour_jitter: Transform | None = None
    antialias: bool = True

    def __post_init__(self) -> None:
        self.fill = tuple(map(round, self.fill))

    def __call__(
        self,
        image: Pixels,
        label: Pixels,
        rng: np.random.Generator,
        pixel: tuple[int, int] | None = None,
        class_id: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a crop and its label.

        image uint8 (H, W, C), label uint8 (H, W) -> image uint8 (h, w, C), label uint8 (h, w), both contiguous.
        `pixel`: (row, column) in `image` that the crop must contain, at a random place in the crop. `class_id`: its
        class. An image that shrinks may lose all pixels of a class. The centre of `pixel` then lies in one pixel of the
        crop, and `class_id` is written there. `image` and `label` are sliced once each, the label again if it lost the
        class: WrongPixel if the pixel never had it.
        """
        height, width = image.shape[:2]
        scaled_size, offset, mirrored = self.draw((height, width), rng, pixel)
        image_crop, label_crop = scale_and_crop(
            image, label, scaled_size, offset, self.crop_size, fill=self.fill, antialias=self.antialias
        )
        if pixel is not None and class_id is not None and not (label_crop == class_id).any():
            _write_back_class(label_crop, label, pixel, class_id, scaled_size, offset)
        if self.colour_jitter is not None:  # draws last, so jitter does not change the choice of crops
            _jitter_colours(image_crop, self.colour_jitter, int(rng.integers(2**63)), scaled_size, offset)
        if mirrored:
            image_crop = _with_channels(cv2.flip(image_crop, 1))
            label_crop = cv2.flip(label_crop, 1)
        return image_crop, label_crop

    def draw(
        self, size: tuple[int, int], rng: np.random.Generator, pixel: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], tuple[int, int], bool]:
        """Draw the scaled size (H, W) of an image of `size`, the crop's offset (top, left) in it, and the flip."""
        mirrored = rng.random() < self.flip
        scale = rng.uniform(*self.scale)
        scaled_size = scale_size(size, scale * base_scale(size, self.base_size))
        top, left = (
            int(rng.integers(*_start_range(*axis)))
            for axis in zip(size, scaled_size, self.crop_size, pixel or (None, None), strict=True)
        )
        return scaled_size, (top, left), mirrored


def _write_back_class(
    label_crop: np.ndarray,
    label: Pixels,
    pixel: tuple[int, int],
    class_id: int,
    scaled_size: tuple[int, int],
    offset: tuple[int, int],
) -> None:
    """Write the class of `pixel` (row, column) of `label` into a crop of it, which has lost the class by shrinking.

    `offset`: (top, left) of the crop in the label at `scaled_size`. WrongPixel: it has another class.
    """
    y, x = pixel
    if label[y : y + 1, x : x + 1] != class_id:
        raise WrongPixel(f"its label has another class than {class_id} there")
    height, width = label.shape[:2]
    row, column = map(scaled_pixel, pixel, (height, width), scaled_size)
    label_crop[row - offset[0], column - offset[1]] = class_id


def _jitter_colours(
    image_crop: np.ndarray, jitter: Transform, seed: int, scaled_size: tuple[int, int], offset: tuple[int, int]
) -> None:
    """Change the colours of a crop in place, except in its padding. `scaled_size`, `offset`: of `_write_back_class`."""
    top, left = (max(0, -start) for start in offset)
    bottom, right = (size - start for size, start in zip(scaled_size, offset, strict=True))
    covered = image_crop[top:bottom, left:right]  # without the padding
    pixels = torch.from_numpy(covered).permute(2, 0, 1)
    covered[:] = seeded(jitter, pixels, seed).permute(1, 2, 0).numpy()


def crop_shares(
    sizes: Sequence[tuple[int, int, int]],
    crop_size: tuple[int, int],
    scale: tuple[float, float],
    base_size: int | None = None,
) -> tuple[float, float]:
    """The expected shares of an image that a crop of a `TrainingTransform` shows, and of the crop that is padding.

    Each image is sampled equally often. `sizes`: (width, height, number of images) for each size of an image.
    """
    width, height, images = np.array(sizes, float).T
    base = 1.0 if base_size is None else base_size / np.maximum(width, height)
    factors = base * np.linspace(*scale, 65)[:, None]  # (scales, sizes), as all below
    rows = height * factors / crop_size[0]  # of a scaled image, in crops
    columns = width * factors / crop_size[1]
    shown = np.minimum(1, 1 / rows) * np.minimum(1, 1 / columns)
    covered = np.minimum(1, rows) * np.minimum(1, columns)
    covered_share = np.average((covered[1:] + covered[:-1]).mean(axis=0) / 2, weights=images)
    return float(np.average(shown.mean(axis=0), weights=images)), 1 - float(covered_share)


def scale_size(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """(H, W) in pixels times a factor, rounded; at least 1x1."""
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def scaled_pixel(pixel: int, original: int, size: int) -> int:
    """Along one axis: the pixel of the scaled image that contains the centre of an original pixel."""
    return (2 * pixel + 1) * size // (2 * original)


def _start_range(original: int, size: int, crop: int, pixel: int | None) -> tuple[int, int]:
    """Along one axis: the half-open range of the crop's start. The crop lies inside the scaled image or contains it."""
    low, high = min(0, size - crop), max(0, size - crop)
    if pixel is not None:
        place = scaled_pixel(pixel, original, size)
        low, high = max(low, place - crop + 1), min(high, place)
    return low, high + 1


def base_scale(size: tuple[int, int], base_size: int | None) -> float:
    """The factor that makes the longest side of (H, W) `base_size` pixels long; 1 if that is None."""
    return 1.0 if base_size is None else base_size / max(size)


def scale_and_crop(
    image: Pixels,
    label: Pixels,
    scaled_size: tuple[int, int],
    offset: tuple[int, int],
    crop_size: tuple[int, int],
    fill: Sequence[float],
    antialias: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a window of `crop_size` at `offset` (top, left; may be negative) out of the image resized to `scaled_size`.

    image uint8 (H, W, C), bilinear; label uint8 (H, W), nearest. Pixels outside the resized image are padding.
    Both are sliced once, to the pixels needed: if slicing reads a file, only those are read.

    `antialias`: average the image over blocks of 0.8 steps of the resize, rounded to whole pixels, before it is
    interpolated. Nothing changes below a step of 1.875 pixels of the image, where blocks are single pixels.
    """
    rows, cols = (
        _CropAxis(original, size, start, crop, antialias)
        for original, size, start, crop in zip(image.shape[:2], scaled_size, offset, crop_size, strict=True)
    )
    pixels = image[rows.needed, cols.needed]
    if (rows.block, cols.block) != (1, 1):
        pixels = _average_blocks(pixels, rows.block, cols.block)
    matrix = np.array([[cols.step, 0, cols.start], [0, rows.step, rows.start]])
    warped = _warp(pixels, matrix, (cols.last - cols.first, rows.last - rows.first))
    nearest = label[rows.needed, cols.needed][rows.nearest].take(cols.nearest, axis=1)
    borders = (rows.first, crop_size[0] - rows.last, cols.first, crop_size[1] - cols.last)
    if any(borders):
        warped = _pad(warped, borders, fill)
        nearest = cv2.copyMakeBorder(nearest, *borders, cv2.BORDER_CONSTANT, value=(IGNORED,))
    return warped, nearest


def _average_blocks(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mean of each block. Blocks that cross the border are filled up with the border's pixels."""
    bottom = -pixels.shape[0] % height
    right = -pixels.shape[1] % width
    if bottom or right:
        pixels = cv2.copyMakeBorder(pixels, 0, bottom, 0, right, cv2.BORDER_REPLICATE)
    size = pixels.shape[1] // width, pixels.shape[0] // height
    return _with_channels(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))


def _warp(pixels: np.ndarray, matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Interpolate pixels, uint8 (h, w, C), at the positions of `matrix`, to `size` (width, height).

    OpenCV interpolates four channels at a time in half the time of three, and other numbers less exactly.
    """

    def warp_four(four: np.ndarray) -> np.ndarray:
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        return cv2.warpAffine(four, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)

    channels = pixels.shape[2]
    if channels == 3:
        return cv2.cvtColor(warp_four(cv2.cvtColor(pixels, cv2.COLOR_RGB2RGBA)), cv2.COLOR_RGBA2RGB)
    padded = np.empty((*pixels.shape[:2], channels + -channels % 4), np.uint8)
    padded[..., :channels] = pixels
    padded[..., channels:] = 0
    parts = [warp_four(np.ascontiguousarray(padded[..., start : start + 4])) for start in range(0, channels, 4)]
    return np.ascontiguousarray(np.concatenate(parts, axis=2)[..., :channels])


def _pad(pixels: np.ndarray, borders: tuple[int, int, int, int], fill: Sequence[float]) -> np.ndarray:
    """Pixels (h, w, C) with borders (top, bottom, left, right) of the colour `fill`."""
    if len(fill) == 3:
        return cv2.copyMakeBorder(pixels, *borders, cv2.BORDER_CONSTANT, value=fill)
    height, width = pixels.shape[:2]  # OpenCV fills four channels at most
    top, bottom, left, right = borders
    padded = np.empty((top + height + bottom, left + width + right, len(fill)), np.uint8)
    padded[:] = np.array(fill, np.uint8)
    padded[top : top + height, left : left + width] = pixels
    return padded


def _with_channels(pixels: np.ndarray) -> np.ndarray:
    """Pixels (H, W, C) of OpenCV, which leaves out the last axis of one channel."""
    return pixels if pixels.ndim == 3 else pixels[..., None]


class _CropAxis:
    """Along one axis: the pixels of the crop that the scaled image covers, and their positions in the original image.

    `first`, `last`: half-open range of the covered pixels. `needed`: slice of the original pixels that they are made
    from, whole blocks of `block` pixels; the positions below count from its start. `step`, `start`: covered pixel i
    lies at block `start + i * step`. `nearest`: for each covered pixel, the index of the nearest original pixel.
    """

    def __init__(self, original: int, size: int, offset: int, crop: int, antialias: bool):
        self.first = max(0, -offset)
        self.last = min(crop, size - offset)
        # Blocks of b pixels and interpolation between them have variance b^2/12 + b^2/6 (its mean over all positions),
        # Pillow's triangle of 2 steps has step^2/6: equal for b = 0.82 steps.
        self.block = max(1, round(0.8 * original / size)) if antialias else 1
        self.step = original / size / self.block
        start = (self.first + offset + 0.5) * self.step - 0.5
        end = start + (self.last - self.first - 1) * self.step
        # floor((x + 0.5) * original / size), but computed by OpenCV: ties between two pixels are arbitrary, and must
        # be broken as in resizing the whole label.
        indices = np.arange(original, dtype=np.float32)[None]
        everywhere = cv2.resize(indices, (size, 1), interpolation=cv2.INTER_NEAREST_EXACT)[0]
        nearest = everywhere[self.first + offset : self.last + offset].astype(np.intp)
        # From floor to ceiling of the coordinates, plus one block at each end because rounding may move them.
        first_block = max(0, math.floor(start) - 1)
        self.needed = slice(first_block * self.block, min(original, (math.floor(end) + 3) * self.block))
        self.start = start - first_block
        self.nearest = nearest - self.needed.start
