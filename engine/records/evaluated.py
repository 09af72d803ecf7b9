"""The outcome of an evaluation, whatever the task."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from models.layers import Extreme


@dataclass(frozen=True)
class Evaluated:
    """Scores and pictures of one evaluation. `table` and `confusion` draw them, and are called only at a run's end."""

    scores: dict  # for metrics.jsonl and results.json
    summary: str  # one line for the log
    images: int  # number of evaluated images, over all ranks
    details: dict = field(default_factory=dict)  # for results.json only
    curves: dict[str, float] = field(default_factory=dict)  # values for TensorBoard, by name
    table: Callable[[], Table] | None = None  # the scores, for the console
    confusion: Callable[[], Figure] | None = None  # the confusion matrix, for TensorBoard and a PNG
    pictures: dict[str, np.ndarray] = field(default_factory=dict)  # uint8 (H, W, 3) by name, for TensorBoard
    layers: dict[str, Extreme] = field(default_factory=dict)  # result of `layer_health`, on rank 0 only
