"""The user's own scores of an evaluation, of either task."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.process.distributed import World
from engine.process.plugins import errors_named
from engine.records.evaluated import Evaluated

PREDICTION, PROBABILITIES = "prediction", "probabilities"  # what a score reads


class AddedScores:
    """Scores by name, each of which sees the prediction and the label of every image.

    A score has `add(prediction, label)`: uint8 (H, W) both, in classification whole numbers; `counts`, a NumPy array
    or tensor, of what it has counted, which is summed over all ranks; and `scores()`, which makes {name: value} of it.
    One with `takes_name` also gets each image's name, in segmentation.

    One with `reads = "probabilities"` gets tensors on the device instead: float32 (classes, rows, W), in classification
    (classes,), and their label. A large image comes in several calls, with some of its rows in each.

    ValueError: `reads` is another, or there are no `counts`.
    """

    def __init__(self, by_name: Mapping[str, Any]):
        self.by_name = {**by_name}
        for name, own in self.by_name.items():
            if (reads := getattr(own, "reads", PREDICTION)) not in (PREDICTION, PROBABILITIES):
                raise ValueError(f"scores={name} has reads={reads!r}: expected {PROBABILITIES!r}, or leave it out")
            with errors_named(f"scores={name}"):
                np.shape(own.counts)

    def reading(self, what: str) -> dict[str, Any]:
        """The scores that read predictions, or probabilities."""
        return {name: own for name, own in self.by_name.items() if getattr(own, "reads", PREDICTION) == what}

    def add(self, predictions: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
        """Count a minibatch. On a GPU the host waits for it."""
        if self.reading(PREDICTION):
            self._add(PREDICTION, (predictions.cpu().numpy(), labels.cpu().numpy()), names, _unwritable)

    def add_probabilities(self, probabilities: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
        """Count a minibatch, or some rows of it: probabilities (N, classes, …), labels (N, …)."""
        self._add(PROBABILITIES, (probabilities, labels), names, Tensor.clone)

    def _add(self, what: str, columns: tuple, names: Sequence[str], copied: Callable[[Any], Any]) -> None:
        """Give each image of a minibatch to the scores that read `what`, each its own copy."""
        for *given, image in zip(*columns, names or [""] * len(columns[0]), strict=True):
            for name, own in self.reading(what).items():
                with errors_named(f"scores={name}"):
                    own.add(*map(copied, given), *[image] * getattr(own, "takes_name", False))

    @contextmanager
    def undone_after_errors(self) -> Iterator[None]:
        """Context after whose errors, such as too little memory, scores of probabilities have counted nothing."""
        before = {name: copy.deepcopy(own.counts) for name, own in self.reading(PROBABILITIES).items()}
        try:
            yield
        except BaseException:
            for name, counts in before.items():
                self.by_name[name].counts = counts
            raise

    def added_to(self, evaluated: Evaluated, world: World) -> Evaluated:
        """The evaluation with these scores. Every rank must call it. ValueError: a name is taken, or no number."""
        found: dict[str, float] = {}
        for name, own in self.by_name.items():
            with errors_named(f"scores={name}"):
                counts = (
                    own.counts.clone() if isinstance(own.counts, Tensor) else torch.from_numpy(np.array(own.counts))
                )
                own.counts = world.sum_(counts.to(world.device)).cpu().numpy()
                made = {score: float(value) for score, value in own.scores().items()}
                if unnamed := [score for score in made if not isinstance(score, str)]:
                    raise TypeError(f"scores() names one {unnamed[0]!r}: expected a text")
            if taken := made.keys() & (evaluated.scores.keys() | evaluated.details.keys() | found.keys()):
                raise ValueError(f"scores={name} gives {min(taken)}, which the evaluation has already: rename it")
            found |= made
        curves = evaluated.curves | {f"val/{name}": value for name, value in found.items()}
        return replace(evaluated, scores=evaluated.scores | found, curves=curves, added=found)


def _unwritable(pixels: np.ndarray) -> np.ndarray:
    """A copy, which a score can change only by going round NumPy, and then for itself alone."""
    copied = np.array(pixels)
    copied.setflags(write=False)
    return copied if copied.ndim else copied[()]


NOTHING_ADDED = AddedScores({})
