"""The parts of a checkpoint and their checks."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models.checkpoints.torch_files import is_plain

MOST_CLASSES, LONGEST_NAME = 65_535, 1_000


def _are(entry_fits: Callable[[object], bool], least: int, most: int) -> Callable[[object], bool]:
    """Return a test for sequences of `least` to `most` entries that each pass `entry_fits`."""
    return lambda value: (
        isinstance(value, (list, tuple)) and least <= len(value) <= most and all(map(entry_fits, value))
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def _are_tensors(value: object) -> bool:
    return isinstance(value, dict) and all(_is_name(name) and is_plain(part) for name, part in value.items())


def _is_image(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and is_plain(value)
        and value.dtype == torch.float64
        and value.ndim == 3
        and value.shape[0] == 3
        and bool(value.isfinite().all())
    )


def _is_number(value: object, most: float) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_record(value: object) -> bool:
    """Whether a value is what `MetricsLogger.recorded` gives."""
    if not isinstance(value, dict) or not _is_number(value.get("records"), most=math.inf):
        return False
    best = value.get("best")
    return best is None or (
        isinstance(best, list) and len(best) == 2 and _is_number(best[0], most=math.inf) and isinstance(best[1], float)
    )


def _are_hashes(value: object) -> bool:
    """Whether a value is {split: (hash of names, of sizes, of the labels' numbering)}."""
    return isinstance(value, dict) and all(map(_are(_is_name, 3, 3), value.values()))


# A test and a description of each part.
PARTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "task": (_is_name, "the name of its task"),
    "step": (partial(_is_number, most=math.inf), "a number of steps"),
    "config": (lambda value: isinstance(value, dict), "the dictionary of the run's configuration"),
    "classes": (_are(_is_name, 1, MOST_CLASSES), f"1 to {MOST_CLASSES} names of at most {LONGEST_NAME} characters"),
    "network": (_are_tensors, "a dictionary {name: tensor}"),
    "ema": (_are_tensors, "a dictionary {name: tensor}"),
    "palette": (
        _are(_are(partial(_is_number, most=255), 3, 3), 1, MOST_CLASSES),
        "an (R, G, B) of 0 to 255 for each class",
    ),
    "label_ids": (_are(partial(_is_number, most=255), 1, MOST_CLASSES), "the id of each class in labels, 0 to 255"),
    "unnamed_classes": (lambda value: value is True, "True"),
    "mean_image": (_is_image, "a finite float64 tensor (3, H, W)"),
    "recorded": (_is_record, "the number of records, and step and score of the best evaluation"),
    "data": (_are_hashes, "three hashes of each split's files"),
}
OF_TRAINING = ("recorded", "data")  # only to resume a run
# Present only with averaged weights, with classes of pixels (twice), if `classes` are mere numbers because the
# checkpoint was converted from a file without names, and if a mean image was subtracted from the images.
OPTIONAL = ("ema", "palette", "label_ids", "unnamed_classes", "mean_image", *OF_TRAINING)
