"""What a run tells: console, log.txt, metrics.jsonl, TensorBoard, results.json."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

import numpy as np
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
from torch.utils.tensorboard import SummaryWriter

from datasets import SegmentationDataset, verify
from engine.environment import environment
from engine.pictures import confusion_picture
from engine.stopping import EXIT_CODE, Preempted

logger = logging.getLogger("engine")


def make_console(rank: int = 0) -> Console:
    """The terminal, or, where the output goes to a file or a pipe, lines that are not broken at 80 columns.

    Of several processes only the first one speaks.
    """
    console = Console(quiet=rank > 0)
    return console if console.is_terminal else Console(width=160, quiet=rank > 0)


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
    on_console = RichHandler(console=console, show_path=False, show_level=False, highlighter=None, level=logging.INFO)
    logger.addHandler(on_console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        in_file = logging.FileHandler(file)
        in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(in_file)


def progress_bar(console: Console, *extra: ProgressColumn) -> Progress:
    """A progress bar with count, the `extra` columns and the time left; nothing where the console is not a terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
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
    except KeyboardInterrupt:
        sys.exit("interrupted; resume=auto with the same run_dir continues a training from its last checkpoint")
    except Preempted as stopped:
        logger.info(f"{stopped}; exit status {EXIT_CODE}: start it again with resume=auto")
        sys.exit(EXIT_CODE)
    except (ValueError, FloatingPointError, MemoryError, OSError) as error:
        logger.debug("", exc_info=True)  # the traceback, in log.txt where there is one
        # A DataLoader's worker wraps the message of an error into a traceback of its own.
        message = str(error).rsplit(f"\n{type(error).__name__}: ", 1)[-1]
        sys.exit(f"error: {message.strip()}")


class RunReport:
    """Reports one training run; a context manager, so that everything is on disk however the run ends.

    Args:
        run_dir: where metrics.jsonl and tensorboard/ are kept; None for a process that only counts along.
        console: where the progress bar is drawn.
        total_steps: length of the run.
        start_step: steps already done; records beyond it, of a run that was killed after its last checkpoint, go.
        max_skipped: training images that may be left out before the run stops.
    """

    def __init__(self, run_dir: Path | None, console: Console, total_steps: int, start_step: int, max_skipped: int = 0):
        self.run_dir = run_dir
        self.mious: dict[int, float] = {}  # of all evaluations, by step; also of those before the run was resumed
        if run_dir is not None:
            self.metrics_file = run_dir / "metrics.jsonl"
            self._drop_records_beyond(start_step, total_steps)
            if start_step == 0:  # what an attempt without a checkpoint left
                for events in (run_dir / "tensorboard").glob("events.out.tfevents.*"):
                    events.unlink()
            self.tensorboard = SummaryWriter(run_dir / "tensorboard", purge_step=start_step + 1)
        self.max_skipped = max_skipped
        self.skipped = 0
        self.console = console
        self.progress = progress_bar(console, TextColumn("{task.fields[status]}"))
        self.task = self.progress.add_task("training", total=total_steps, completed=start_step, status="")
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.images = 0
        self.seconds = 0.0
        self.step_started = time.perf_counter()

    def __enter__(self) -> "RunReport":
        self.progress.start()
        self.step_started = time.perf_counter()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.stop()
        if self.skipped:
            logger.warning(f"{self.skipped} training images could not be read and were skipped")
        if self.run_dir is not None:
            self.tensorboard.close()

    def step(self, loss: float, gradient_norm: float, images: int) -> None:
        """Count one training step. The time since the last call of `step` or `pause_ended` is the step's."""
        now = time.perf_counter()
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)
        self.images += images
        self.seconds += now - self.step_started
        self.step_started = now
        self.progress.update(self.task, advance=1)

    @property
    def best_miou(self) -> float:
        """Of all evaluations; -1 before the first."""
        return max((miou for miou in self.mious.values() if not math.isnan(miou)), default=-1.0)

    def skips(self, count: int, reasons: list[str]) -> None:
        """Count images that could not be read, of all processes; `reasons` are those of this one.

        Raises:
            ValueError: there have been too many.
        """
        for reason in reasons:
            logger.warning(f"skipped: {reason}")
        self.skipped += count
        if self.skipped > self.max_skipped:
            raise ValueError(
                f"{self.skipped} training images could not be read, more than data.max_skipped={self.max_skipped}: "
                f"restore them, python -m scripts.verify_data lists them, or raise data.max_skipped"
            )

    def pause_ended(self) -> None:
        """What happened since the last step (evaluation, checkpoint) is not training time."""
        self.step_started = time.perf_counter()

    def training(self, step: int, epoch: float, lr: float, peak_memory_mib: float) -> None:
        """Record the training since the last record: mean loss, gradient, learning rate, images per second, memory."""
        loss = sum(self.losses) / len(self.losses)
        gradient_norm = sum(self.gradient_norms) / len(self.gradient_norms)
        speed = self.images / self.seconds
        self.losses, self.gradient_norms, self.images, self.seconds = [], [], 0, 0.0
        if self.run_dir is None:
            return
        values = {
            "loss": loss,
            "lr": lr,
            "gradient_norm": gradient_norm,
            "images_per_second": speed,
            "peak_memory_mib": peak_memory_mib,
        }
        self._record({"kind": "train", "step": step, "epoch": round(epoch, 4), **values})
        for name, value in values.items():
            self.tensorboard.add_scalar(f"train/{name}", value, step)
        # Short enough for a bar on a terminal of 80 columns.
        status = f"loss {loss:.3f} lr {lr:.1e} {speed:.1f} img/s {peak_memory_mib:.0f} MiB"
        self.progress.update(self.task, status=status)
        # On a terminal the progress bar says the same.
        logger.log(logging.DEBUG if self.console.is_terminal else logging.INFO, f"step {step}  {status}")

    def evaluation(self, step: int, epoch: float, scores: dict, pictures: dict[str, np.ndarray]) -> None:
        """Record scores of `engine.metrics.segmentation_scores` and pictures {name: uint8 (H, W, 3)}."""
        self.mious[step] = scores["miou"]
        if self.run_dir is None:
            return
        self._record({"kind": "val", "step": step, "epoch": round(epoch, 4), **scores})
        self.tensorboard.add_scalar("val/miou", scores["miou"], step)
        self.tensorboard.add_scalar("val/pixel_accuracy", scores["pixel_accuracy"], step)
        for name, iou in scores["iou"].items():
            if iou is not None:
                self.tensorboard.add_scalar(f"val_iou/{name}", iou, step)
        for name, pixels in pictures.items():
            self.tensorboard.add_image(f"image_label_prediction/{name}", pixels, step, dataformats="HWC")
        self.tensorboard.flush()
        logger.info(f"step {step}  val mIoU {scores['miou']:.4f}  pixel accuracy {scores['pixel_accuracy']:.4f}")

    def _record(self, record: dict) -> None:
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps(_without_nan(record)) + "\n")

    def _drop_records_beyond(self, step: int, total_steps: int) -> None:
        """Keep the records of the steps that the run continues from; the final evaluation is always made again."""
        if not self.metrics_file.is_file():
            return
        kept = []
        for number, line in enumerate(self.metrics_file.read_text(errors="replace").splitlines(), start=1):
            try:
                record = json.loads(line)
                beyond = record["step"] > step or (record["kind"] == "val" and record["step"] == total_steps)
            except (ValueError, KeyError, TypeError):  # the machine stopped while it was written
                logger.info(f"{self.metrics_file}: line {number} is damaged and dropped")
                continue
            if not beyond:
                kept.append(line + "\n")
                if record["kind"] == "val":
                    self.mious[record["step"]] = math.nan if record["miou"] is None else record["miou"]
        partial = self.metrics_file.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(self.metrics_file)


def iou_table(scores: dict, title: str) -> Table:
    """The scores of `engine.metrics.all_scores` as a table for the console, in percent; official ones on the right."""
    official = scores["official"]
    iiou = official.get("iiou", {})
    has_iiou = any(value is not None for value in iiou.values())
    on_the_right = "iIoU %" if has_iiou else "official %" if official and not iiou else None
    table = Table(title=title, title_justify="left", caption_justify="left", min_width=40)
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
        path.write_text(json.dumps(_without_nan(results)) + "\n")
        picture = confusion_picture(confusion.numpy(), dataset.classes, title=f"{dataset.name} {dataset.split}")
        picture.savefig(path.with_name(f"{path.stem}_confusion.png"), dpi=120)
    return results


def _without_nan(value):
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
