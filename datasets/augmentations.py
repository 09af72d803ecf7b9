"""The user's own augmentations, after a training crop is made."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from datasets.class_table import check_form, check_train_ids, form_of

_STREAM = 3  # of random numbers; samplers and images in memory have 0 to 2
_FURTHER_STREAM = 4  # that draws further crops
MOST_MIXES = 64
Crop = tuple[np.ndarray, np.ndarray | None]
Augmentation = Any  # a function, crop, label, generator -> both; perhaps with `mixes`
DrawCrop = Callable[[np.random.Generator], Crop]


class Moment(NamedTuple):
    """Where in a run a crop is: the step that takes it, from 1 on, the epoch at its end, and the crop's number."""

    step: int = 1
    epoch: float = 0.0
    place: int = 0


@dataclass
class Augmentations:
    """Functions, by name, that change a crop one after the other.

    Each gets the image, uint8 (H, W, C), the label, uint8 (H, W) or None in classification, and a generator of random
    numbers, and returns both, of the same shapes. One with `mixes = k` also gets a list of k further crops (image,
    label) of the same dataset, and one that names `step`, `epoch` or `place` gets these of the crop's `Moment`. What is
    drawn depends only on `seed`, epoch and image.
    """

    by_name: Mapping[str, Augmentation]
    seed: int

    def __post_init__(self) -> None:
        self._moment_fields = {name: moment_fields(function) for name, function in self.by_name.items()}

    def __call__(
        self,
        image: np.ndarray,
        label: np.ndarray | None,
        key: tuple[int, ...],
        moment: Moment,
        classes: int = 0,
        draw: DrawCrop | None = None,
    ) -> Crop:
        """The changed crop.

        `key`: (epoch, number of the image, perhaps its place in it). `moment`: of the run. `classes`: how many a label
        may hold. `draw`: makes a further crop.
        ValueError: a result has another form, or a label another id than these and `IGNORED`.
        """
        rng, further_rng = (
            np.random.default_rng(np.random.SeedSequence([self.seed, *key], spawn_key=(stream,)))
            for stream in (_STREAM, _FURTHER_STREAM)
        )
        image = np.ascontiguousarray(image)
        for name, augment in self.by_name.items():
            arguments: list[Any] = [image, label, rng]
            if draw and hasattr(augment, "mixes"):
                arguments.append([draw(further_rng) for _ in range(augment.mixes)])
            try:
                fields = {field: getattr(moment, field) for field in self._moment_fields[name]}
                new_image, new_label = augment(*arguments, **fields)
            except (Exception, SystemExit) as error:  # anything, from code that is not ours
                raise ValueError(f"augmentations={name}: {type(error).__name__}: {error}") from error
            returned = f"augmentations={name} returned"
            check_form(f"{returned} the image as", new_image, form_of(image))
            image = new_image
            if label is not None:
                check_form(f"{returned} the label as", new_label, form_of(label))
                check_train_ids(f"{returned} a label", new_label, classes)
                label = new_label
        return image, label


def moment_fields(function: Any) -> list[str]:
    """The fields of `Moment` that are arguments of a function."""
    with suppress(ValueError, TypeError):  # code in C may have no signature
        return [name for name in Moment._fields if name in signature(function).parameters]
    return []
