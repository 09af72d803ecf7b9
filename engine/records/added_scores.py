"""The user's own scores of an evaluation, of either task."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.process.distributed import World
from engine.process.plugins import errors_named
from engine.records.evaluated import Evaluated

# What a score reads.
PREDICTION = "prediction"
PROBABILITIES = "probabilities"


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
        for name, score in self.by_name.items():
            reads = getattr(score, "reads", PREDICTION)
            if reads not in (PREDICTION, PROBABILITIES):
                raise ValueError(f"scores={name} has reads={reads!r}: expected {PROBABILITIES!r}, or leave it out")
            if not hasattr(score, "counts"):
                raise ValueError(f"scores={name} has no counts: expected an array or tensor of what add() has counted")
            with errors_named(f"scores={name}"):
                np.shape(score.counts)

    def scores_reading(self, source: str) -> dict[str, Any]:
        """The scores that read predictions, or probabilities."""
        return {name: score for name, score in self.by_name.items() if getattr(score, "reads", PREDICTION) == source}

    def add(self, predictions: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
        """Count a minibatch. On a GPU the host waits for it."""
        if self.scores_reading(PREDICTION):
            self._give_to_scores(PREDICTION, (predictions.cpu().numpy(), labels.cpu().numpy()), names)

    def add_probabilities(self, probabilities: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
        """Count a minibatch, or some rows of it: probabilities (N, classes, …), labels (N, …)."""
        self._give_to_scores(PROBABILITIES, (probabilities, labels), names)

    def _give_to_scores(self, source: str, columns: tuple, names: Sequence[str]) -> None:
        """Give each image of a minibatch to the scores that read a source, each its own copy."""
        image_names = names or ["" for _ in columns[0]]
        for *arrays, image_name in zip(*columns, image_names, strict=True):
            for name, score in self.scores_reading(source).items():
                with errors_named(f"scores={name}"):
                    copies = [array.clone() if isinstance(array, Tensor) else array.copy() for array in arrays]
                    score.add(*copies, *([image_name] if getattr(score, "takes_name", False) else []))

    @contextmanager
    def undone_after_errors(self) -> Iterator[None]:
        """Context after whose errors, such as too little memory, scores of probabilities have counted nothing."""
        scores = self.scores_reading(PROBABILITIES)
        counts_before = {name: copy.deepcopy(score.counts) for name, score in scores.items()}
        try:
            yield
        except BaseException:
            for name, score in scores.items():
                score.counts = counts_before[name]
            raise

    def sum_and_add_to(self, evaluated: Evaluated, world: World) -> Evaluated:
        """Sum the counts over all ranks, and return the evaluation with these scores. Every rank must call it.

        ValueError: a name is taken, or a score is no number.
        """
        added: dict[str, float] = {}
        for name, score in self.by_name.items():
            with errors_named(f"scores={name}"):
                counts = score.counts
                of_rank = counts.clone() if isinstance(counts, Tensor) else torch.from_numpy(np.array(counts))
                summed = world.sum_(of_rank.to(world.device))
                score.counts = summed.to(counts.device) if isinstance(counts, Tensor) else summed.cpu().numpy()
                values = {value_name: float(value) for value_name, value in score.scores().items()}
                unnamed = [value_name for value_name in values if not isinstance(value_name, str)]
                if unnamed:
                    raise TypeError(f"scores() names one {unnamed[0]!r}: expected a text")
            duplicates = values.keys() & (evaluated.scores.keys() | evaluated.details.keys() | added.keys())
            if duplicates:
                raise ValueError(f"scores={name} gives {min(duplicates)}, which the evaluation has already: rename it")
            added |= values
        curves = evaluated.curves | {f"val/{name}": value for name, value in added.items()}
        return replace(evaluated, scores=evaluated.scores | added, curves=curves, added=added)


NOTHING_ADDED = AddedScores({})
