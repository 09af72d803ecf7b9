"""The canvas of a street scene with its pinhole camera, and the exposure that turns the drawing into a photograph."""

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import ArrayLike

_HEIGHT, _WIDTH = 128, 256  # of the finished picture, pixels
_FINER = 2  # draw at this multiple of the size and average down, which softens edges like a camera

# Cityscapes label ids
EGO, BORDER, STATIC = 1, 2, 4
ROAD, SIDEWALK, BUILDING, FENCE, POLE, LIGHT, SIGN = 7, 8, 11, 13, 17, 19, 20
VEGETATION, TERRAIN, SKY, PERSON, CAR = 21, 22, 23, 24, 26

_GRAIN = {ROAD: 0.06, SIDEWALK: 0.08, BUILDING: 0.06, FENCE: 0.08, VEGETATION: 0.22, TERRAIN: 0.2, SKY: 0.02}


class View:
    """The canvas and its camera. World coordinates in metres: x right, y up from the street, z ahead."""

    def __init__(self, rng: np.random.Generator):
        self.height, self.width = _HEIGHT * _FINER, _WIDTH * _FINER
        self.image = np.zeros((self.height, self.width, 3), np.uint8)
        self.label = np.full((self.height, self.width), SKY, np.uint8)
        self.horizon = self.height * rng.uniform(0.38, 0.47)
        self.centre = self.width * rng.uniform(0.4, 0.6)
        self.camera = rng.uniform(1.5, 2.0)  # metres above the street
        self.focal = self.width * 0.8
        self.haze = np.array([200, 208, 216]) * rng.uniform(0.85, 1.1)
        self.clear = rng.uniform(60, 250)  # metres; haze covers 1 - exp(-z / clear) of a colour
        self.sun = rng.uniform(0.75, 1.0, size=2)  # light on the left and right side of the street

    def at(self, x: float, y: float, z: float) -> tuple[int, int]:
        """World to canvas pixels."""
        scale = self.focal / z
        return round(self.centre + x * scale), round(self.horizon + (self.camera - y) * scale)

    def length(self, metres: float, z: float, at_least: int = 1) -> int:
        """Length in canvas pixels: at least `at_least` pixels in the finished picture."""
        return max(round(metres * self.focal / z), at_least * _FINER)

    def colour(self, rgb: ArrayLike, z: float, light: float = 1.0) -> list[float]:
        rgb = np.clip(np.asarray(rgb) * light, 0, 255)
        mixed = self.haze + (rgb - self.haze) * np.exp(-z / self.clear)
        return np.clip(mixed, 0, 255).tolist()

    def polygon(self, points: ArrayLike, rgb: Sequence[float], label: int | None) -> None:
        corners = np.clip(np.asarray(points), -30000, 30000).astype(np.int32)
        cv2.fillPoly(self.image, [corners], rgb)
        if label is not None:
            cv2.fillPoly(self.label, [corners], label)

    def box(
        self, left: float, top: float, right: float, bottom: float, rgb: Sequence[float], label: int | None
    ) -> None:
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], rgb, label)

    def wall(
        self, x: float, heights: tuple[float, float], z: tuple[float, float], rgb: Sequence[float], label: int | None
    ) -> None:
        """A rectangle along the street. x, heights, z: metres."""
        (low, high), (near, far) = heights, z
        corners = [self.at(x, y, ahead) for y, ahead in ((low, near), (high, near), (high, far), (low, far))]
        self.polygon(corners, rgb, label)

    def ellipse(self, centre: Sequence[float], axes: Sequence[float], rgb: Sequence[float], label: int | None) -> None:
        centre_pixel, axes_pixels = tuple(map(round, centre)), tuple(map(round, axes))
        cv2.ellipse(self.image, centre_pixel, axes_pixels, 0, 0, 360, rgb, -1)
        if label is not None:
            cv2.ellipse(self.label, centre_pixel, axes_pixels, 0, 0, 360, label, -1)


def expose(view: View, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Average down to the finished size, then add material grain, light and shade, a colour tint and sensor noise."""
    size = (_WIDTH, _HEIGHT)
    image = cv2.resize(view.image, size, interpolation=cv2.INTER_AREA).astype(np.float32)
    label = np.ascontiguousarray(view.label[_FINER // 2 :: _FINER, _FINER // 2 :: _FINER])
    strength = np.full(256, 0.05, np.float32)
    for material, amount in _GRAIN.items():
        strength[material] = amount
    fine = rng.standard_normal((_HEIGHT, _WIDTH), dtype=np.float32)
    coarse = cv2.resize(rng.standard_normal((_HEIGHT // 8, _WIDTH // 8), dtype=np.float32), size)
    grain = 1 + strength[label] * (0.6 * fine + 0.8 * coarse)
    clouds = 1 + 0.12 * cv2.resize(rng.standard_normal((3, 5), dtype=np.float32), size, interpolation=cv2.INTER_CUBIC)
    tint = rng.uniform(0.9, 1.1, size=3).astype(np.float32) * np.float32(rng.uniform(0.65, 1.15))
    image = image * (grain * clouds)[..., None] * tint
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(rng.uniform(2, 7))
    label[:2], label[-2:], label[:, :2], label[:, -2:] = BORDER, BORDER, BORDER, BORDER
    return np.clip(image, 0, 255).astype(np.uint8), label
