"""Random changes of a crop's colours."""

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class ColourJitter:
    """Random changes of brightness, contrast, saturation and hue, in random order: torchvision's ColorJitter.

    It calls torchvision's functions, but draws its own random numbers: torchvision's come from torch's global
    generator, so they would depend on the worker. `brightness`, `contrast`, `saturation`: a value s gives factors
    between max(0, 1 - s) and 1 + s. `hue`: shifts between -hue and hue turns of the colour circle, at most 0.5.
    ValueError for a value out of range.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("brightness", math.inf), ("contrast", math.inf), ("saturation", math.inf), ("hue", 0.5)):
            strength = getattr(self, name)
            if not 0 <= strength <= most:
                limit = "" if most == math.inf else f" and at most {most}"
                raise ValueError(f"{name}={strength} must be at least 0{limit}")

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
