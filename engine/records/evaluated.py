"""The outcome of an evaluation, whatever the task."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from models.layers import Extreme


@dataclass(frozen=True)
class Evaluated:
    """Scores and pictures of one evaluation.

    scores: for metrics.jsonl and results.json.
    summary: one line for the log.
    images: number of evaluated images, over all ranks.
    details: for results.json only.
    curves: values for TensorBoard, by name.
    table: draws the scores as a table for the console; called only at the end of the run, like `confusion`.
    confusion: draws the confusion matrix, for TensorBoard and a PNG.
    pictures: uint8 (H, W, 3) by name, for TensorBoard.
    layers: result of `layer_health`, on rank 0 only.
    """

    scores: dict
    summary: str
    images: int
    details: dict = field(default_factory=dict)
    curves: dict[str, float] = field(default_factory=dict)
    table: Callable[[], Table] | None = None
    confusion: Callable[[], Figure] | None = None
    pictures: dict[str, np.ndarray] = field(default_factory=dict)
    layers: dict[str, Extreme] = field(default_factory=dict)
