"""Results of an evaluation of any task, and the file results.json."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from datasets import ClassificationDataset, SegmentationDataset
from engine.process.console import table_of
from engine.process.output_files import write_file
from engine.records.provenance import provenance
from models.private_torch import tree_map

Dataset = SegmentationDataset | ClassificationDataset  # a split of either task
T = TypeVar("T")


@dataclass(frozen=True)
class Evaluated:
    """Scores and pictures of one evaluation."""

    scores: dict  # for metrics.jsonl and results.json
    summary: str  # one line for the log
    images: int  # number of evaluated images, over all ranks
    details: dict = field(default_factory=dict)  # for results.json only
    curves: dict[str, float] = field(default_factory=dict)  # percentages for TensorBoard, by name
    table: Callable[[], Table] | None = None  # the scores, for the console
    pictures: dict[str, np.ndarray] = field(default_factory=dict)  # uint8 (H, W, 3) by name, for TensorBoard
    added: dict[str, float] = field(default_factory=dict)  # further scores, for a second table


def write_results(path: Path | None, evaluated: Evaluated, dataset: Dataset, checkpoint: Path, config: dict) -> dict:
    """Return the results of one evaluation, and write them to `path` if given.

    A full disk or a kill leaves the old results or the complete new ones.
    """
    results = {
        "dataset": dataset.name,
        "split": dataset.split,
        **evaluated.scores,
        **evaluated.details,
        "images": evaluated.images,
        "checkpoint": str(checkpoint),
        "config": config,
        "environment": provenance(),
    }
    if path is not None:
        write_file(path, json.dumps(without_nan(results)) + "\n")
    return results


def print_results(console: Console, evaluated: Evaluated, title: str) -> None:
    """Print the title, then the table of scores or, without one, the summary."""
    console.print(title, soft_wrap=True)
    console.print(evaluated.summary if evaluated.table is None else evaluated.table())
    if evaluated.added:
        rows = ([name, f"{value:.4g}"] for name, value in evaluated.added.items())
        console.print(table_of(["score", "value"], rows))


def without_nan(value: T) -> T:
    """Replace NaN and infinity, which JSON does not have, by None in nested containers."""
    return tree_map(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, value)
