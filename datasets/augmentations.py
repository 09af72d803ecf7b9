"""The user's own augmentations, after a training crop is made."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datasets.class_table import IGNORED, ranges

_STREAM, _OTHERS_STREAM = 3, 4  # of random numbers; samplers and images in memory have 0 to 2
MOST_MIXES = 64
Crop = tuple[np.ndarray, np.ndarray | None]
Augmentation = Any  # a function, crop, label, generator -> both; perhaps with `mixes`
Drawn = Callable[[np.random.Generator], Crop]


@dataclass
class Augmentations:
    """Functions, by name, that change a crop one after the other.

    Each gets the image, uint8 (H, W, C), the label, uint8 (H, W) or None in classification, and a generator of random
    numbers, and returns both, of the same shapes. One with `mixes = k` also gets a list of k further crops (image,
    label) of the same dataset. All that is drawn depends only on `seed`, epoch and image.
    """

    by_name: Mapping[str, Augmentation]
    seed: int
    # Of a process's first minibatch, until `check_order`: arguments and results, of each function.
    _first: list[tuple[tuple[Any, ...], list[Crop]]] | None = field(default_factory=list, init=False, repr=False)

    def __call__(
        self,
        image: np.ndarray,
        label: np.ndarray | None,
        key: tuple[int, ...],
        classes: int = 0,
        draw: Drawn | None = None,
    ) -> Crop:
        """The changed crop.

        `key`: (epoch, number of the image, perhaps its place in it). `classes`: how many a label may hold. `draw`:
        makes a further crop.
        ValueError: a result has another form, or a label another id than these and `IGNORED`.
        """
        if self._first is None:
            *_, (_, crop) = self._steps(image, label, key, classes, draw)
            return crop
        given = *deepcopy((image, label)), key, classes, draw
        made = [deepcopy(crop) for _, crop in self._steps(image, label, key, classes, draw)]
        self._first.append((given, made))
        return deepcopy(made[-1])

    def check_order(self) -> None:
        """After each minibatch of a process: make the crops of the first again, in reverse order.

        ValueError: an augmentation makes others, so it keeps what it has seen, or draws from other generators; a run
        that is resumed would have other weights. (A single crop says nothing, so it waits for another.)
        """
        if self._first is None or len(self._first) < 2:
            return
        first, self._first = self._first, None
        for given, made in reversed(first):
            for (name, again), before in zip(self._steps(*given), made, strict=True):
                if not all(np.array_equal(new, old) for new, old in zip(again, before, strict=True)):
                    raise ValueError(
                        f"augmentations={name} made another crop of the same image when images came in another order, "
                        f"so a resumed run would train on other crops: keep nothing from crop to crop, and draw from "
                        f"the generator that is given; further crops: `mixes`"
                    )

    def _steps(
        self, image: np.ndarray, label: np.ndarray | None, key: tuple[int, ...], classes: int, draw: Drawn | None
    ) -> Iterator[tuple[str, Any]]:
        """The crop after each augmentation, by its name."""
        rng, of_others = (
            np.random.default_rng(np.random.SeedSequence([self.seed, *key], spawn_key=(stream,)))
            for stream in (_STREAM, _OTHERS_STREAM)
        )
        image = np.ascontiguousarray(image)
        for name, augment in self.by_name.items():
            others = [[draw(of_others) for _ in range(augment.mixes)]] if draw and hasattr(augment, "mixes") else []
            try:
                changed, own = augment(image, label, rng, *others)
            except (Exception, SystemExit) as error:  # anything, from code that is not ours
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
            yield name, (image, label)


def _form(array: object) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
