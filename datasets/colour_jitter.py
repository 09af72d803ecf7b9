"""Random changes of a crop's colours."""

from dataclasses import dataclass

import cv2
import numpy as np
import torch

# Eigenvalues and eigenvectors (columns) of the covariance of ImageNet's RGB values in 0-1. Source: fb.resnet.torch.
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]],
)


@dataclass(frozen=True)
class ColourJitter:
    """Random changes of brightness, contrast, saturation and hue, in random order: torchvision's ColorJitter.

    It calls torchvision's functions, but draws its own random numbers: torchvision's come from torch's global
    generator, so they would depend on the worker. `brightness`, `contrast`, `saturation`: a value s gives factors
    between max(0, 1 - s) and 1 + s. `hue`: shifts between -hue and hue turns of the colour circle, at most 0.5.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """image uint8 (H, W, 3) RGB -> a new image of the same shape and dtype."""
        from torchvision.transforms.v2 import functional  # takes as long to import as torch, and few runs need it

        changes = []
        for name in ("brightness", "contrast", "saturation"):
            if strength := getattr(self, name):
                adjust = getattr(functional, f"adjust_{name}")
                changes.append((adjust, rng.uniform(max(0.0, 1 - strength), 1 + strength)))
        if self.hue:
            changes.append((functional.adjust_hue, rng.uniform(-self.hue, self.hue)))
        pixels = torch.from_numpy(image).permute(2, 0, 1)
        for place in rng.permutation(len(changes)):
            adjust, amount = changes[place]
            pixels = adjust(pixels, amount)
        return pixels.permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class Lighting:
    """AlexNet's change of the light's colour (Krizhevsky et al. 2012): adds the same random RGB shift to all pixels.

    The shift is a sum of ImageNet's colour components, each times its eigenvalue and a normal number of standard
    deviation `strength`. Sums are rounded to whole levels and cut off at 0 and 255.
    """

    strength: float = 0.1

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """image uint8 (H, W, 3) RGB -> a new image of the same shape and dtype."""
        shift = 255 * _EIGENVECTORS @ (_EIGENVALUES * rng.normal(0, self.strength, 3))  # RGB
        tables = np.clip(np.arange(256) + shift[:, None], 0, 255).round().astype(np.uint8)  # (3, 256)
        planes = [cv2.LUT(plane, table) for plane, table in zip(image.transpose(2, 0, 1), tables, strict=True)]
        return np.stack(planes).transpose(1, 2, 0)
