"""What an evaluation needs from a checkpoint's content."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

MOST_CLASSES = 65_535


def _are(entry_fits: Callable[[object], bool], least: int, most: int) -> Callable[[object], bool]:
    """Return a test for sequences of `least` to `most` entries that each pass `entry_fits`."""
    return lambda value: (
        isinstance(value, (list, tuple)) and least <= len(value) <= most and all(map(entry_fits, value))
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _are_tensors(value: object) -> bool:
    return isinstance(value, dict) and all(_is_name(name) and isinstance(part, Tensor) for name, part in value.items())


def _is_image(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.float64
        and value.ndim == 3
        and value.shape[0] == 3
        and bool(value.isfinite().all())
    )


def _is_number(value: object, most: float) -> bool:
    return type(value) is int and 0 <= value <= most


# What an evaluation needs from a checkpoint: a test of each part, and its description.
PARTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "task": (_is_name, "the name of its task"),
    "step": (partial(_is_number, most=float("inf")), "a number of steps"),
    "config": (lambda value: isinstance(value, dict), "the dictionary of the run's configuration"),
    "classes": (_are(_is_name, 1, MOST_CLASSES), f"1 to {MOST_CLASSES} names"),
    "network": (_are_tensors, "a dictionary {name: tensor}"),
    "ema": (_are_tensors, "a dictionary {name: tensor}"),
    "palette": (
        _are(_are(partial(_is_number, most=255), 3, 3), 1, MOST_CLASSES),
        "an (R, G, B) of 0 to 255 for each class",
    ),
    "unnamed_classes": (lambda value: value is True, "True"),
    "mean_image": (_is_image, "a finite float64 tensor (3, H, W)"),
}
# Present only with averaged weights, with coloured classes, if `classes` are mere numbers because the checkpoint was
# converted from a file without names, and if a mean image was subtracted from the images.
OPTIONAL = ("ema", "palette", "unnamed_classes", "mean_image")
