"""What an evaluation finds, whatever the task."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from models.layers import Extreme


@dataclass(frozen=True)
class Evaluated:
    """
    scores: for metrics.jsonl and results.json.
    summary: for the log, one line.
    images: how many were evaluated, by all processes.
    details: for results.json alone.
    curves: values for TensorBoard, by name.
    table, confusion: the scores for the console, and a figure for TensorBoard and a PNG; both are made only at the end.
    pictures: uint8 (H, W, 3) by name, for TensorBoard.
    layers: of `layer_health`, in the first process alone.
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
