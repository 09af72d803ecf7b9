"""What a training run tells while it runs: progress, metrics.jsonl, TensorBoard."""

import json
import logging
import math
import shlex
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import TextColumn
from torch.utils.tensorboard import SummaryWriter

from engine.config import assignment
from engine.layer_health import Extreme
from engine.reporting import logger, progress_bar, without_nan
from engine.run_directory import RunDirectory


class RunReport:
    """Reports one training run; a context manager, so that everything is on disk however the run ends.

    Args:
        run_dir: where metrics.jsonl and tensorboard/ are kept; None for a process that only counts along.
        console: where the progress bar is drawn.
        total_steps: length of the run.
        start_step: steps already done; records beyond it, of a run that was killed after its last checkpoint, go.
        max_skipped: training images that may be left out before the run stops.
        skipped: how many have been, up to `start_step`.
        config_text: config.yaml, shown in TensorBoard.
    """

    def __init__(
        self,
        run_dir: Path | None,
        console: Console,
        total_steps: int,
        start_step: int,
        max_skipped: int = 0,
        skipped: int = 0,
        config_text: str = "",
    ):
        self.run_dir = run_dir
        self.mious: dict[int, float] = {}  # of all evaluations, by step; also of those before the run was resumed
        if run_dir is not None:
            self.metrics_file = run_dir / "metrics.jsonl"
            self._drop_records_beyond(start_step, total_steps)
            if start_step == 0:  # what an attempt without a checkpoint left
                for events in (run_dir / "tensorboard").glob("events.out.tfevents.*"):
                    events.unlink()
            self.tensorboard = SummaryWriter(run_dir / "tensorboard", purge_step=start_step + 1)
            if start_step == 0:  # a run that continues still has it
                self.tensorboard.add_text("config", f"```yaml\n{config_text}\n```", 0)
        self.max_skipped = max_skipped
        self.skipped = skipped
        self.console = console
        self.progress = progress_bar(console, TextColumn("{task.fields[status]}"))
        self.task = self.progress.add_task("training", total=total_steps, completed=start_step, status="")
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.images = 0
        self.seconds = 0.0
        self.all_steps, self.all_images, self.all_seconds, self.peak_memory_mib = 0, 0, 0.0, 0.0  # of this process
        self.step_started = time.perf_counter()

    def __enter__(self) -> "RunReport":
        self.progress.start()
        self.step_started = time.perf_counter()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.stop()
        if self.skipped and self.run_dir is not None:
            logger.warning(f"{self.skipped} training images could not be read and were skipped")
        if self.run_dir is not None:
            # On a full disk, of two errors the one that ended the training says more.
            with suppress(OSError) if exception[0] else nullcontext():
                self.tensorboard.close()

    def step(self, loss: float, gradient_norm: float, images: int) -> None:
        """Count one training step. The time since the last call of `step` or `pause_ended` is the step's."""
        now = time.perf_counter()
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)
        self.images += images
        self.seconds += now - self.step_started
        self.all_steps += 1
        self.all_images += images
        self.all_seconds += now - self.step_started
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

    def training(
        self, step: int, epoch: float, lr: float, peak_memory_mib: float, loss_scale: float | None = None
    ) -> None:
        """Record the training since the last record: mean loss, gradient, learning rate, images per second, memory.

        `loss_scale`: of float16. Images that were skipped are counted from the run's start, once there is one.
        """
        loss = sum(self.losses) / len(self.losses)
        gradient_norm = sum(self.gradient_norms) / len(self.gradient_norms)
        speed = self.images / self.seconds
        self.losses, self.gradient_norms, self.images, self.seconds = [], [], 0, 0.0
        self.peak_memory_mib = max(self.peak_memory_mib, peak_memory_mib)
        if self.run_dir is None:
            return
        values = {
            "loss": loss,
            "lr": lr,
            "gradient_norm": gradient_norm,
            "images_per_second": speed,
            "peak_memory_mib": peak_memory_mib,
        }
        if loss_scale is not None:
            values["loss_scale"] = loss_scale
        if self.skipped:
            values["skipped_images"] = self.skipped
        self._record({"kind": "train", "step": step, "epoch": round(epoch, 4), **values})
        for name, value in values.items():
            self.tensorboard.add_scalar(f"train/{name}", value, step)
        self.tensorboard.flush()  # for those who watch
        # Short enough for a bar on a terminal of 80 columns.
        status = f"loss {loss:.3f} lr {lr:.1e} {speed:.1f} img/s {peak_memory_mib:.0f} MiB"
        self.progress.update(self.task, status=status)
        # On a terminal the progress bar says the same.
        logger.log(logging.DEBUG if self.console.is_terminal else logging.INFO, f"step {step}  {status}")

    def evaluation(
        self,
        step: int,
        epoch: float,
        scores: dict,
        pictures: dict[str, np.ndarray],
        layers: dict[str, Extreme] | None = None,
    ) -> None:
        """Record scores of `engine.metrics.all_scores`, pictures {name: uint8 (H, W, 3)} and `layer_health`."""
        self.mious[step] = scores["miou"]
        if self.run_dir is None:
            return
        layers = layers or {}
        named = {name: {"layer": layer, "value": value} for name, (layer, value) in layers.items()}
        self._record({"kind": "val", "step": step, "epoch": round(epoch, 4), **scores, "layers": named})
        self.tensorboard.add_scalar("val/miou", scores["miou"], step)
        self.tensorboard.add_scalar("val/pixel_accuracy", scores["pixel_accuracy"], step)
        for name, iou in scores["iou"].items():
            if iou is not None:
                self.tensorboard.add_scalar(f"val_iou/{name}", iou, step)
        for name, (layer, value) in layers.items():
            self.tensorboard.add_scalar(f"layers/{name}", value, step)
            logger.debug(f"step {step}  {name} {value:.3g} in {layer}")
        for name, pixels in pictures.items():
            self.tensorboard.add_image(f"image_label_prediction/{name}", pixels, step, dataformats="HWC")
        self.tensorboard.flush()
        logger.info(f"step {step}  val mIoU {scores['miou']:.4f}  pixel accuracy {scores['pixel_accuracy']:.4f}")

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Show a figure in TensorBoard."""
        if self.run_dir is not None:
            self.tensorboard.add_figure(name, figure, step)

    def summary(self, directory: RunDirectory, of: str = "") -> str:
        """Lines for the end of the run: what it took, what it left, and the commands that go on from there.

        `of`: words for the images that its evaluations saw, where they were not all.
        """
        speed = f", {self.all_images / self.all_seconds:.1f} images/s" if self.all_seconds else ""
        memory = f", at most {self.peak_memory_mib:.0f} MiB" if self.peak_memory_mib else ""
        took = f"{self.all_steps} steps in {timedelta(seconds=round(self.all_seconds))}{speed}{memory}"
        last = max(self.mious)
        best = next((step for step, miou in self.mious.items() if miou == self.best_miou), None)  # None: all are NaN
        lines = {
            "run": str(directory.path),
            "training": f"{took}, {self.skipped} images skipped",
            "last": f"{directory.last}, step {last}, mIoU {100 * self.mious[last]:.2f} %{of}",
            "best": f"{directory.best}, step {best}, mIoU {100 * self.best_miou:.2f} %{of}" if best else "none",
            "evaluate": shlex.join(["python", "eval.py", assignment("checkpoint", directory.last)]),
            "curves": shlex.join(["tensorboard", "--logdir", str(directory.path / "tensorboard")]),
        }
        return "\n".join(f"{name:<9} {line}" for name, line in lines.items())

    def _record(self, record: dict) -> None:
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps(without_nan(record)) + "\n")

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
