"""results.json: an evaluation's scores, and everything needed to repeat it."""

import json
import math
from pathlib import Path

from rich.console import Console

from engine.dataset import Dataset
from engine.records.evaluated import Evaluated
from engine.records.provenance import provenance


def write_results(path: Path | None, evaluated: Evaluated, dataset: Dataset, checkpoint: Path, config: dict) -> dict:
    """Return the results of one evaluation, and write them to `path` if given.

    The file is replaced atomically: a full disk or a kill leaves the old results or the complete new ones. A confusion
    matrix, if any, is drawn beside the file as NAME_confusion.png.
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
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_name(path.name + ".partial")
        partial_file.write_text(json.dumps(without_nan(results)) + "\n")
        partial_file.replace(path)
        if evaluated.confusion is not None:
            evaluated.confusion().savefig(path.with_name(f"{path.stem}_confusion.png"), dpi=120)
    return results


def print_results(console: Console, evaluated: Evaluated, title: str) -> None:
    """Print the title, then the table of scores or, without one, the summary."""
    console.print(title, soft_wrap=True, highlight=False)
    console.print(evaluated.summary if evaluated.table is None else evaluated.table())


def without_nan(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None in nested containers."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
