"""How entries speak: console, log, progress, errors, tables of scores, results.json. A run's curves: run_report."""

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor

from datasets import SegmentationDataset, verify
from engine.environment import environment
from engine.memory import is_out_of_memory
from engine.pictures import confusion_picture
from engine.stopping import EXIT_CODE, Preempted

logger = logging.getLogger("engine")


def make_console(rank: int = 0) -> Console:
    """The terminal, or, where the output goes to a file or a pipe, lines that are not broken at 80 columns.

    Of several processes only the first one speaks. What is printed may hold paths and names of the data: no square
    brackets or colons in it are instructions.
    """
    make = partial(Console, quiet=rank > 0, markup=False, emoji=False)
    console = make()
    return console if console.is_terminal else make(width=160)


def log_to(console: Console, file: Path | None, rank: int = 0) -> None:
    """Send the log to the console and, with times and details, to `file` (appended to).

    Of several processes those beyond the first one say what is wrong, on stderr.
    """
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if rank > 0:
        warnings_only = logging.StreamHandler()
        warnings_only.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        warnings_only.setLevel(logging.WARNING)
        logger.addHandler(warnings_only)
        return
    if console.is_terminal:
        on_console = RichHandler(console=console, show_path=False, show_level=False, highlighter=None)
    else:  # a line is a line
        on_console = logging.StreamHandler(console.file)
        on_console.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    on_console.setLevel(logging.INFO)
    logger.addHandler(on_console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        in_file = LogFile(file)
        in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(in_file)


class LogFile(logging.FileHandler):
    """Drops what a full disk does not take, where logging prints a traceback for each line: a run ends of it anyway."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def progress_bar(console: Console, *extra: ProgressColumn) -> Progress:
    """A progress bar with count, the `extra` columns and the time left; nothing where the console is not a terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *extra,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def tracked(progress: Progress, items: Sized, description: str) -> Iterator:
    """Yield the items, counting them in a bar of `progress` that is removed at the end."""
    task = progress.add_task(description, total=len(items), status="")
    try:
        for item in items:
            yield item
            progress.advance(task)
    finally:
        progress.remove_task(task)


@contextmanager
def counted(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that shows how far something is in a bar, from its first call to the end."""
    with progress_bar(console) as progress:
        tasks = []

        def show(done: int, total: int) -> None:
            tasks or tasks.append(progress.add_task(description, total=total, status=""))
            progress.update(tasks[0], completed=done)

        yield show


def verify_with_progress(dataset: SegmentationDataset, console: Console, stops: bool = True) -> None:
    """`datasets.verify` with a progress bar; the same ValueError, or, where it does not stop the run, a warning."""
    try:
        with counted(console, f"checking {dataset.name} {dataset.split}") as progress:
            verify(dataset, progress=progress)
    except ValueError as error:
        if stops:
            raise
        logger.warning(f"data.on_error=skip: {error}")


@contextmanager
def errors_for_users() -> Iterator[None]:
    """Turn errors that the user can mend into one message and exit status 1; others keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        sys.exit(f"interrupted; {interrupt}" if str(interrupt) else "interrupted")
    except Preempted as stopped:
        logger.info(f"{stopped}; exit status {EXIT_CODE}: start it again with resume=auto")
        sys.exit(EXIT_CODE)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.debug("", exc_info=True)
        sys.exit(
            f"error: out of memory, and not in a step or with an image: {str(error).strip().splitlines()[0]}. Network "
            f"and optimiser alone need more than is free: look for other processes there, or take a smaller body"
        )
    except (ValueError, FloatingPointError, MemoryError, OSError) as error:
        logger.debug("", exc_info=True)  # the traceback, in log.txt where there is one
        # A DataLoader's worker wraps the message of an error into a traceback of its own.
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1]
        sys.exit(f"error: {message.strip()}")


def print_scores(console: Console, scores: dict, title: str) -> None:
    """`iou_table` below its title."""
    console.print(title, soft_wrap=True, highlight=False)
    console.print(iou_table(scores))


def iou_table(scores: dict) -> Table:
    """The scores of `engine.metrics.all_scores` as a table for the console, in percent; official ones on the right."""
    official = scores["official"]
    iiou = official.get("iiou", {})
    has_iiou = any(value is not None for value in iiou.values())
    on_the_right = "iIoU %" if has_iiou else "official %" if official and not iiou else None
    table = Table(caption_justify="left", min_width=40)
    table.add_column("class")
    for column in filter(None, ("IoU %", on_the_right)):
        table.add_column(column, justify="right")

    def row(name: str, *values: float | str | None, style: str | None = None) -> None:
        cells = [
            value if isinstance(value, str) else "–" if value is None else f"{100 * value:.2f}" for value in values
        ]
        table.add_row(name, *cells[: len(table.columns) - 1], style=style)

    beside = iiou or official.get("iou", {})
    for name in {**scores["iou"], **beside}:
        row(name, scores["iou"].get(name, ""), beside.get(name, ""))
    table.add_section()
    row("mean (mIoU)", scores["miou"], official.get("mean_iiou" if has_iiou else "miou", ""), style="bold")
    row("pixel accuracy", scores["pixel_accuracy"], official.get("pixel_accuracy", ""))
    if "mean_accuracy" in official:
        row("mean accuracy", "", official["mean_accuracy"])
        row("frequency-weighted IoU", "", official["frequency_weighted_iou"])
    if "category_iou" in official:
        table.add_section()
        for name, iou in official["category_iou"].items():
            row(name, iou, official["category_iiou"].get(name, ""))
        row("mean of categories", official["mean_category_iou"], official["mean_category_iiou"], style="bold")
    if iiou and not has_iiou:
        table.caption = "no iIoU: it needs the instanceIds file of every image"
    return table


def write_results(
    path: Path | None,
    *,
    dataset: SegmentationDataset,
    scores: dict,
    confusion: Tensor,
    images: int,
    views: dict,
    checkpoint: Path,
    config: dict,
) -> dict:
    """Return the results of one evaluation, with what is needed to repeat it, and write them to `path` if given.

    What was at `path` is replaced in one go: a full disk or a kill leaves it, or the whole of the new results.
    Beside `path`, NAME_confusion.png is the picture of the confusion matrix. `views`: of `inference.Views.record`.
    """
    results = {
        "dataset": dataset.name,
        "split": dataset.split,
        **scores,
        "confusion_matrix": confusion.tolist(),
        "images": images,
        "views": views,
        "checkpoint": str(checkpoint),
        "config": config,
        "environment": environment(),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_name(path.name + ".partial")
        partial_file.write_text(json.dumps(without_nan(results)) + "\n")
        partial_file.replace(path)
        picture = confusion_picture(confusion.numpy(), dataset.classes, title=f"{dataset.name} {dataset.split}")
        picture.savefig(path.with_name(f"{path.stem}_confusion.png"), dpi=120)
    return results


def without_nan(value):
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
