"""The user's own augmentations, after a training crop is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from datasets.class_table import IGNORED, ranges

_STREAM = 3  # of random numbers; samplers and images in memory have 0 to 2
Crop = tuple[np.ndarray, np.ndarray | None]
Augmentation = Callable[[np.ndarray, np.ndarray | None, np.random.Generator], Crop]


@dataclass(frozen=True)
class Augmentations:
    """Functions, by name, that change a crop one after the other.

    Each gets the image, uint8 (H, W, C), the label, uint8 (H, W) or None in classification, and a generator of random
    numbers, and returns both, of the same shapes. What it draws depends only on `seed`, epoch and image.
    """

    by_name: Mapping[str, Augmentation]
    seed: int

    def __call__(self, image: np.ndarray, label: np.ndarray | None, key: tuple[int, ...], classes: int = 0) -> Crop:
        """`key`: (epoch, number of the image, perhaps its place in it). `classes`: how many a label may hold.

        ValueError: a result has another form, or a label another id than these and `IGNORED`.
        """
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, *key], spawn_key=(_STREAM,)))
        image = np.ascontiguousarray(image)
        for name, augment in self.by_name.items():
            try:
                changed, own = augment(image, label, rng)
            except Exception as error:  # anything, from code that is not ours
                raise ValueError(f"augmentations={name}: {type(error).__name__}: {error}") from error
            for what, new, old in (("image", changed, image), ("label", own, label)):
                if old is not None and _form(new) != _form(old):
                    raise ValueError(f"augmentations={name} returned the {what} as {_form(new)}: expected {_form(old)}")
            image, label = changed, None if label is None else own
            if label is not None and (foreign := np.unique(label[(label >= classes) & (label != IGNORED)])).size:
                raise ValueError(
                    f"augmentations={name} returned a label with the ids {ranges(foreign.tolist())}: expected classes "
                    f"from 0 to {classes - 1}, and {IGNORED} for pixels that do not count"
                )
        return image, label


def _form(array: object) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
