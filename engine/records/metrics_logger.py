"""The records of a training run: progress bar, log, metrics.jsonl, TensorBoard, and the final summary."""

import json
import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from datasets.file_list import printable
from engine.process.console import SLOW_SECONDS, logger, progress_bar, time_left
from engine.process.output_files import write_file
from engine.records.evaluated import Evaluated, without_nan

PLANNED_STEPS = 3  # first steps, in which budgets are planned, cuDNN chooses algorithms and code is compiled
LOGGED_STEPS = 2  # first steps, each of which has a line of the log if it is slow
WAITING = 0.1  # share of the time between two records, from which a run warns that steps wait for data


class MetricsLogger:
    """Records one training run. A context manager: on exit everything is on disk, even after an error.

    Args:
        run_dir: for metrics.jsonl and tensorboard/, which shows its config.yaml; None on ranks that only keep counts.
        score: name of the score that selects best.pt.
        start_step: steps already done. If there are any, metrics.jsonl gets a record that the run was resumed; records
            of later steps, left by a run killed after its last checkpoint, are removed.
        previous_scores: step and score of the evaluations that the checkpoint knows.
        patience: evaluations in a row without a better score, after which the run ends; None: it does not.
        wait_warning: makes a warning that steps wait for data, from the share of their time.
        tell: passes on what TensorBoard gets, see `Run.tell_loggers`.
    """

    def __init__(
        self,
        run_dir: Path | None,
        console: Console,
        score: str,
        total_steps: int,
        start_step: int,
        previous_scores: Iterable[tuple[int, float]] = (),
        patience: int | None = None,
        wait_warning: Callable[[float], str] | None = None,
        tell: Callable[..., None] = lambda *_: None,
    ):
        self.run_dir = run_dir
        self.score = score
        self.wait_warning = wait_warning  # None after it was logged
        self.tell = tell
        self.scores: dict[int, float] = dict(previous_scores)  # by step, also those before resuming
        self.patience = patience
        self.early_end_reason = ""  # for the end before the last step
        if run_dir is not None:
            self._open_files(run_dir, start_step, total_steps)
        # Of lines about steps: on a terminal the progress bar says the same.
        self.level = logging.DEBUG if console.is_terminal else logging.INFO
        self.progress = progress_bar(console)
        self.task_id = self.progress.add_task("training", total=total_steps, completed=start_step, status="")
        self.done_steps = start_step
        self.total_steps = total_steps
        self.pauses_s = self.first_s = 0.0  # of this process; first_s: its first step
        self.recent_sums: Counter[str] = Counter()  # sums since the last record
        self.process_sums: Counter[str] = Counter()  # sums of this process
        self.first_sums: Counter[str] = Counter()  # sums of its first steps
        self.recent_memory_mib = self.peak_memory_mib = 0.0  # largest noted since the last record, and of all records
        self.step_started = time.perf_counter()

    def __enter__(self) -> "MetricsLogger":
        self.progress.start()
        self.step_started = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        # After an error such as a full disk, closing may fail too.
        with suppress(OSError) if exception[0] else nullcontext():
            if self.run_dir is not None:
                self.tensorboard.close()

    @property
    def best(self) -> list | None:
        """Step and score of the best evaluation, the earliest if several tie; None if there is none, or all are NaN."""
        steps = [step for step, score in self.scores.items() if not math.isnan(score)]
        step = max(steps, key=self.scores.__getitem__, default=None)
        return None if step is None else [step, self.scores[step]]

    @property
    def evaluations_since_best(self) -> int:
        """The number of evaluations after the best one."""
        best, _ = self.best or (-1, None)
        return sum(step > best for step in self.scores)

    @property
    def ends_early(self) -> bool:
        """Whether so many evaluations were not better that the run ends before its last step."""
        return self.patience is not None and self.evaluations_since_best >= self.patience

    def end_early(self, step: int, reason: str) -> None:
        """Make `step` the run's last one, and log why."""
        logger.info(f"the run ends after step {step:,} of {self.total_steps:,}: {reason}")
        self.progress.update(self.task_id, total=step, status=reason)
        self.total_steps = step
        self.early_end_reason = reason

    def count_step(
        self, loss: float, gradient_norm: float, images: int, data_s: float = 0.0, ended_s: float | None = None
    ) -> None:
        """Count one training step, timed from the end of the last one, or from the last call of `pause_ended`.

        `data_s`: seconds of it that this rank waited for its minibatch. `ended_s`: the clock at its end; None: now.
        """
        if ended_s is None:
            ended_s = time.perf_counter()
        seconds = ended_s - self.step_started
        self.step_started = ended_s
        step_values: dict[str, Any] = {
            "steps": 1,
            "loss": loss,
            "gradient_norm": gradient_norm,
            "images": images,
            "data_s": data_s,
            "seconds": seconds,
        }
        self.recent_sums.update(step_values)
        self.process_sums.update(step_values)
        if self.process_sums["steps"] <= PLANNED_STEPS:
            self.first_sums.update(step_values)
        if self.process_sums["steps"] == 1:
            self.first_s = seconds
        self.done_steps += 1
        self.progress.update(self.task_id, advance=1)
        if self.run_dir is not None and self.process_sums["steps"] <= LOGGED_STEPS and seconds > SLOW_SECONDS:
            text = f"loss {loss:.3f} {seconds:.1f} s{self._time_left()}"
            logger.log(self.level, f"step {self.done_steps:,} of {self.total_steps:,}  {text}")

    def pause_ended(self) -> None:
        """Exclude the time since the last step (e.g. an evaluation) from the next."""
        end_s = time.perf_counter()
        self.pauses_s += end_s - self.step_started
        self.step_started = end_s

    def _time_left(self) -> str:
        """The time for the remaining steps, at the speed since the last record and with as many pauses as so far.

        The first step does not count: it may also have compiled code, or searched for fast kernels.
        """
        counts = self.recent_sums if self.recent_sums["steps"] else self.process_sums
        steps = counts["steps"]
        seconds = float(counts["seconds"])
        if steps == self.process_sums["steps"]:
            steps = max(0, steps - 1)
            seconds -= self.first_s
        pauses_s = self.pauses_s * steps / max(1, self.process_sums["steps"])
        return time_left(self.total_steps - self.done_steps, seconds + pauses_s, steps)

    def note_memory(self, peak_mib: float) -> None:
        """Note a memory peak before the device resets it; the next record holds the largest."""
        self.recent_memory_mib = max(self.recent_memory_mib, peak_mib)

    def data_wait_s(self) -> float:
        """Mean seconds per step, since the last record, that this rank waited for data."""
        return round(self.recent_sums["data_s"] / self.recent_sums["steps"], 6)

    def record_training(
        self,
        step: int,
        epoch: float,
        lr: float,
        peak_memory_mib: float,
        loss_scale: float | None = None,
        data_waits_s: Sequence[float] | None = None,
    ) -> None:
        """Record the mean loss, gradient norm and speed since the last call, and the last step's `lr`.

        `loss_scale`: None unless in float16. `data_waits_s`: of all ranks; None: of this one.
        """
        data_waits_s = data_waits_s or [self.data_wait_s()]
        left = self._time_left()
        recent = self.recent_sums
        self.recent_sums = Counter()
        loss = recent["loss"] / recent["steps"]
        speed = recent["images"] / recent["seconds"]
        peak_memory_mib = max(peak_memory_mib, self.recent_memory_mib)
        self.recent_memory_mib = 0.0
        self.peak_memory_mib = max(self.peak_memory_mib, peak_memory_mib)
        if self.run_dir is None:
            return
        if self.process_sums["steps"] > recent["steps"]:  # in the first record the data workers start
            self._warn_once_of_waiting(max(data_waits_s) * recent["steps"] / recent["seconds"])
        values = {
            "loss": loss,
            "lr": lr,
            "gradient_norm": recent["gradient_norm"] / recent["steps"],
            "images_per_second": speed,
            "peak_memory_mib": peak_memory_mib,
            **({} if loss_scale is None else {"loss_scale": loss_scale}),
        }
        self._record({"kind": "train", "step": step, "epoch": round(epoch, 4), **values, "data_wait_s": data_waits_s})
        values["data_wait_s"] = max(data_waits_s)
        self._show(step, {f"train/{name}": value for name, value in values.items()}, {})
        status = f"loss {loss:.3f} lr {lr:.1e} {speed:.1f} img/s {peak_memory_mib:.0f} MiB"
        self.progress.update(self.task_id, status=status)
        logger.log(self.level, f"step {step:,} of {self.total_steps:,}  {status}{left}")

    def _warn_once_of_waiting(self, waiting_share: float) -> None:
        """Warn, the first time, if steps wait for data for too large a share of their time."""
        if self.wait_warning is not None and waiting_share > WAITING:
            logger.warning(self.wait_warning(waiting_share))
            self.wait_warning = None

    def record_evaluation(self, step: int, epoch: float, evaluated: Evaluated) -> None:
        """Record an evaluation: scores, curves and pictures."""
        self.scores[step] = evaluated.scores[self.score]
        if self.run_dir is None:
            return
        self._record({"kind": "val", "step": step, "epoch": round(epoch, 4), **evaluated.scores})
        self._show(step, evaluated.curves, evaluated.pictures)
        logger.info(f"step {step:,} of {self.total_steps:,}  val {evaluated.summary}{self._time_left()}")

    def summary(
        self, last_file: Path, best_file: Path, score_text: Callable[[float], str], evaluate: Callable[[Path], str]
    ) -> str:
        """The run's cost, its files, and the next commands, one per line. The first steps do not count as speed.

        `last_file`, `best_file`: its checkpoints. `score_text` formats a score; `evaluate` makes the command that
        evaluates a checkpoint: the last one, and the best one of a run that ended early.
        """
        speed = ""
        counted = (self.process_sums - self.first_sums) or self.process_sums
        seconds = counted["seconds"]
        if seconds:
            waiting_percent = 100 * counted["data_s"] / seconds
            speed = f", {counted['images'] / seconds:.1f} images/s, {waiting_percent:.0f} % of it waiting for data"
        memory = f", at most {self.peak_memory_mib:.0f} MiB" if self.peak_memory_mib else ""
        duration = timedelta(seconds=round(self.process_sums["seconds"]))
        cost = f"{self.process_sums['steps']} steps in {duration}{speed}{memory}"
        last = max(self.scores)
        best = self.best
        run_dir = last_file.parents[1]
        gone = "" if best_file.is_file() else " (gone)"
        lines = {
            "run": str(run_dir),
            "training": cost,
            **({"ended": f"early: {self.early_end_reason}"} if self.early_end_reason else {}),
            "last": f"{last_file}, step {last}, {score_text(self.scores[last])}",
            "best": f"{best_file}{gone}, step {best[0]}, {score_text(best[1])}" if best else "none",
            "evaluate": evaluate(last_file),
            **({"or best": evaluate(best_file)} if self.early_end_reason and best and not gone else {}),
            "curves": shlex.join(["tensorboard", "--logdir", str(run_dir / "tensorboard")]),
        }
        return "\n".join(f"{name:<9} {line}" for name, line in lines.items())

    def _show(self, step: int, values: Mapping[str, Any], pictures: Mapping[str, np.ndarray]) -> None:
        """Give scalars and pictures to TensorBoard, and to the run's own loggers."""
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)
        for name, pixels in pictures.items():
            self.tensorboard.add_image(printable(name), pixels, step, dataformats="HWC")
        self.tensorboard.flush()
        self.tell("scalars", step, values)
        for name, pixels in pictures.items():
            self.tell("picture", step, printable(name), pixels)

    def _record(self, record: dict) -> None:
        with open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(record)) + "\n")
        self.events_folder.mkdir(exist_ok=True)  # TensorBoard appends to its file there, or to a new one

    def _open_files(self, run_dir: Path, start_step: int, total_steps: int) -> None:
        """Open metrics.jsonl and TensorBoard's file, without what an attempt has left beyond `start_step`."""
        self.metrics_file = run_dir / "metrics.jsonl"
        self.events_folder = run_dir / "tensorboard"
        self.events_folder.mkdir(parents=True, exist_ok=True)
        if self.metrics_file.is_file():
            self._drop_records_beyond(start_step)
            if start_step == 0:  # left by an attempt that saved no checkpoint
                for events in self.events_folder.glob("events.out.tfevents.*"):
                    events.unlink()
        if 0 < start_step < total_steps and not self.ends_early:
            self._record({"kind": "resumed", "step": start_step})
        self.tensorboard = SummaryWriter(self.events_folder, purge_step=start_step + 1)
        config = run_dir / "config.yaml"
        if start_step == 0 and config.is_file():  # a resumed run still has it
            self.tensorboard.add_text("config", f"```yaml\n{config.read_text()}\n```", 0)

    def _drop_records_beyond(self, step: int) -> None:
        """Keep the records up to the resumed step, except its evaluation if that will be repeated."""
        repeats_evaluation = step not in self.scores or self.ends_early
        lines = []
        for number, line in enumerate(self.metrics_file.read_text(errors="replace").splitlines(), start=1):
            try:
                record = json.loads(line)
                is_repeated = repeats_evaluation and (record["kind"], record["step"]) == ("val", step)
                if record["step"] <= step and not is_repeated:
                    lines.append(line + "\n")
            except (ValueError, KeyError, TypeError):  # the machine died while writing it
                logger.info(f"{self.metrics_file}: dropped damaged line {number}")
        write_file(self.metrics_file, "".join(lines))
