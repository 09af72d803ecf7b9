"""The user's own scores of an evaluation, of either task."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.process.distributed import World
from engine.records.evaluated import Evaluated


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Context that names the score in any error of its code, which is not ours."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"scores={name}: {type(error).__name__}: {error}") from error


class AddedScores:
    """Scores by name, each of which sees the prediction and the label of every image.

    A score has `add(prediction, label)`: uint8 (H, W) both, in classification whole numbers; `counts`, a NumPy array
    of what it has counted, which is summed over all ranks; and `scores()`, which makes {name: value} of it. One with
    `takes_name` also gets each image's name, in segmentation.
    """

    def __init__(self, by_name: Mapping[str, Any]):
        self.by_name = {**by_name}

    def add(self, predictions: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
        """Count a minibatch. On a GPU the host waits for it."""
        if self.by_name:
            columns = predictions.cpu().numpy(), labels.cpu().numpy(), names or [""] * len(labels)
            for prediction, label, image in zip(*columns, strict=True):
                for name, own in self.by_name.items():
                    with _named(name):
                        own.add(prediction, label, *[image] * getattr(own, "takes_name", False))

    def added_to(self, evaluated: Evaluated, world: World) -> Evaluated:
        """The evaluation with these scores. Every rank must call it. ValueError: a name is taken, or no number."""
        found: dict[str, float] = {}
        for name, own in self.by_name.items():
            with _named(name):
                own.counts = world.sum_(torch.from_numpy(np.array(own.counts)).to(world.device)).cpu().numpy()
                made = {score: float(value) for score, value in own.scores().items()}
            if taken := made.keys() & (evaluated.scores.keys() | evaluated.details.keys() | found.keys()):
                raise ValueError(f"scores={name} gives {min(taken)}, which the evaluation has already: rename it")
            found |= made
        curves = evaluated.curves | {f"val/{name}": value for name, value in found.items()}
        return replace(evaluated, scores=evaluated.scores | found, curves=curves, added=found)


NOTHING_ADDED = AddedScores({})
