"""The user's own scores of an evaluation, of either task."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.process.distributed import World
from engine.records.evaluated import Evaluated


class AddedScores:
    """Scores by name, each of which sees the prediction and the label of every image.

    A score has `add(prediction, label)`: uint8 (H, W) both, in classification whole numbers; `counts`, a NumPy array
    of what it has counted, which is summed over all ranks; and `scores()`, which makes {name: value} of it.
    """

    def __init__(self, by_name: Mapping[str, Any]):
        self.by_name = by_name

    def add(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a minibatch. On a GPU the host waits for it."""
        if self.by_name:
            for prediction, label in zip(predictions.cpu().numpy(), labels.cpu().numpy(), strict=True):
                for own in self.by_name.values():
                    own.add(prediction, label)

    def added_to(self, evaluated: Evaluated, world: World) -> Evaluated:
        """The evaluation with these scores. Every rank must call it. ValueError: a name is taken, or no number."""
        found: dict[str, float] = {}
        for name, own in self.by_name.items():
            own.counts = world.sum_(torch.from_numpy(np.array(own.counts)).to(world.device)).cpu().numpy()
            for score, value in own.scores().items():
                if score in evaluated.scores or score in evaluated.details or score in found:
                    raise ValueError(f"scores={name} gives {score}, which the evaluation has already: rename it")
                found[score] = float(value)
        curves = evaluated.curves | {f"val/{name}": value for name, value in found.items()}
        return replace(evaluated, scores=evaluated.scores | found, curves=curves, added=found)


NOTHING_ADDED = AddedScores({})
