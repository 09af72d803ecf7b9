"""Records of a run: complete, speeds without pauses, no record twice, none lost."""

import itertools
import json
import logging
import math
import shlex
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from engine.checkpoint import files as checkpoint
from engine.checkpoint.run_directory import RunDirectory
from engine.process import start
from engine.records.evaluated import Evaluated
from engine.records.metrics_logger import MetricsLogger
from engine.training import advice
from tests.runs import NARROW_A2, REPOSITORY, SHORT, checked, run_config, same
from train_seg import train

SCORES = {"miou": 0.5, "iou": {"road": 0.5, "sky": None}, "pixel_accuracy": 0.75}


@pytest.fixture(autouse=True)
def every_file_of_events_is_of_another_second(monkeypatch):
    """TensorBoard reads them in the order of their names, which start with the second."""
    seconds = itertools.count(1_700_000_000.0)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))


def logger(run_dir, start_step=0, total_steps=10) -> MetricsLogger:
    return MetricsLogger(run_dir, Console(quiet=True), "miou", total_steps, start_step)


def evaluated(**scores) -> Evaluated:
    return Evaluated({**SCORES, **scores}, summary="mIoU 0.5", images=2)


def summary_of(running: MetricsLogger, directory: RunDirectory) -> list[str]:
    """The lines of a segmentation run's summary."""
    config = run_config()
    evaluate = partial(advice.evaluation_command, config)
    return running.summary(directory.last, directory.best, config.score_text, evaluate).splitlines()


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events_of(run_dir) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard")).Reload()


def test_a_folder_that_is_gone_is_an_error_of_the_run_without_a_traceback_of_tensorboard(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", start._print_error_of_thread)  # in place of pytest's
    directory = RunDirectory(str(tmp_path / "run"))
    message = rf"^run_dir={directory.path} \(.*\) was removed or renamed while the run used it: .* start the run again$"
    with pytest.raises(OSError, match=message), directory.in_use():
        directory.lock()
        with logger(directory.path) as running:
            running.tensorboard.flush()  # its thread would write into the folder while it is removed
            shutil.rmtree(directory.path)
            running.tensorboard.add_scalar("loss", 1.0, 1)
            running.tensorboard.flush()
    assert capfd.readouterr().err == ""


def recorded(running: MetricsLogger, *steps: int) -> None:
    for step in steps:
        running.count_step(1.0, 1.0, 1)
        running.record_training(step, 0.0, 0.1, 0.0)


def test_a_run_goes_on_without_its_records_that_are_removed(tmp_path):
    with logger(tmp_path) as running:
        recorded(running, 1, 2)
        (tmp_path / "metrics.jsonl").unlink()
        shutil.rmtree(tmp_path / "tensorboard")
        recorded(running, 3, 4)
    assert [record["step"] for record in records(tmp_path)] == [3, 4]
    assert [event.step for event in events_of(tmp_path).Scalars("train/loss")] == [3, 4]


def trained(run_dir, *overrides: str) -> dict:
    return train(checked("train_seg", f"run_dir={run_dir}", *SHORT, "trainer.steps=4", *overrides), "python a b=c")


def test_watching_does_not_change_the_weights(tmp_path):
    """One run has pictures after every step. Both have bfloat16, dropout and averaged weights."""
    options = (*NARROW_A2, "norm=inplace_1", "trainer.ema_decay=0.5", "trainer.precision=bfloat16")
    trained(tmp_path / "watched", *options, "trainer.evaluate_every_steps=1")
    trained(tmp_path / "not", *options, "trainer.pictures=0")
    watched, not_watched = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("watched", "not"))
    assert all(same(watched[part], not_watched[part]) for part in ("network", "ema"))
    torch.testing.assert_close(watched["random"]["cpu"], not_watched["random"]["cpu"], rtol=0, atol=0)


def test_the_summary_says_what_is_there(tmp_path, monkeypatch):
    directory = RunDirectory(str(tmp_path))
    with logger(tmp_path) as running:
        running.record_evaluation(5, 0.0, evaluated(miou=math.nan))
        assert "best      none" in summary_of(running, directory) and running.best is None
        for step, miou in ((6, -0.25), (7, 0.75), (8, 0.75), (10, 0.5)):
            running.record_evaluation(step, 0.0, evaluated(miou=miou))
    lines = summary_of(running, directory)
    assert lines[2] == f"last      {tmp_path}/checkpoints/last.pt, step 10, mIoU 50.00 %"
    assert lines[3] == f"best      {tmp_path}/checkpoints/best.pt (gone), step 7, mIoU 75.00 %"
    directory = RunDirectory(str(tmp_path / "lr=1,bs=2 [a'b]"))  # the command survives any folder
    for folder, entry in ((REPOSITORY, "eval.py"), (tmp_path, str(REPOSITORY / "eval.py"))):  # and from any folder
        monkeypatch.chdir(folder)
        (line,) = (line for line in summary_of(running, directory) if line.startswith("evaluate"))
        *command, argument = shlex.split(line.removeprefix("evaluate"))
        assert command == ["python", entry] and checked("eval", argument).checkpoint == str(directory.last)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_says_once_that_steps_wait_for_data(tmp_path, monkeypatch, caplog, is_first):
    """Only rank 0 says it. The first steps, in which data workers start, do not count; nor do waits under a tenth."""
    monkeypatch.setattr("engine.records.metrics_logger.logger", logging.getLogger("of this test"))
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=2).__next__)  # a step takes two seconds
    waits = partial(run_config().data.waits, workers=2, cores=16)
    warning = (
        "steps wait for data 25 % of the time: raise data.workers (now 2, with 16 cores), or give smaller image files"
    )
    folder = tmp_path if is_first else None
    with MetricsLogger(folder, Console(quiet=True), "miou", 10, 0, wait_warning=waits) as running:
        for step, (own_s, others_s) in enumerate([(1.0, 1.8), (0.1, 0.2), (0.0, 0.5), (1.0, 1.0)], start=1):
            running.count_step(loss=1.0, gradient_norm=1.0, images=1, data_s=own_s)
            running.record_training(step, 0.0, 0.1, 1.0, data_waits_s=[own_s, others_s])
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert warnings == [warning] * (step > 2 and is_first)


def test_images_per_second_do_not_count_pauses_but_the_time_left_does(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("engine.records.metrics_logger.logger", logging.getLogger("of this test"))
    caplog.set_level(logging.INFO)
    clock = iter([0.0, 0.0, 20.0, 118.0, 120.0])  # made, entered, step, end of the pause, step
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with logger(tmp_path) as running:
        running.count_step(loss=1.0, gradient_norm=2.0, images=8, data_s=0.5)
        running.pause_ended()
        running.count_step(loss=3.0, gradient_norm=5.0, images=8, data_s=1.0)
        assert running.data_wait_s() == 0.75
        running.note_memory(80.0)  # before an evaluation, after which it counts anew
        running.record_training(step=2, epoch=0.5, lr=0.1, peak_memory_mib=64.0, loss_scale=4.0)
        first, second, third = (record.getMessage() for record in caplog.records)
        assert first == "step 1 of 10  loss 1.000 20.0 s"  # it may have compiled code
        # Eight steps are left, each with 2 s and half of the pause of 98 s.
        assert second == "step 2 of 10  loss 3.000 2.0 s, 0:06:48 left"
        assert third == "step 2 of 10  loss 2.000 lr 1.0e-01 0.7 img/s 80 MiB, 0:06:48 left"
        values = {"lr": 0.1, "peak_memory_mib": 80.0, "loss": 2.0, "gradient_norm": 3.5, "images_per_second": 16 / 22}
        values["loss_scale"] = 4.0
        assert records(tmp_path) == [{"kind": "train", "step": 2, "epoch": 0.5, **values, "data_wait_s": [0.75]}]
        running.record_evaluation(2, 0.5, evaluated())
        assert "0.7 images/s, 7 % of it waiting for data" in "\n".join(summary_of(running, RunDirectory(str(tmp_path))))
    assert [event.value for event in events_of(tmp_path).Scalars("train/loss_scale")] == [4.0]


def test_the_first_steps_of_a_process_do_not_count_as_its_speed(tmp_path, monkeypatch):
    """Four steps of 2 s follow, which wait for data half of the time."""
    clock = itertools.chain([0.0, 0.0, 20.0, 40.0, 60.0], itertools.count(62.0, 2.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with logger(tmp_path) as running:
        for number in range(7):
            running.count_step(loss=1.0, gradient_norm=1.0, images=8, data_s=1.0 if number > 2 else 0.0)
        running.record_evaluation(7, 0.0, evaluated())
    took = "training  7 steps in 0:01:08, 4.0 images/s, 50 % of it waiting for data"
    assert took in summary_of(running, RunDirectory(str(tmp_path)))


def write_run(run_dir, start_step, steps, total_steps=10):
    (run_dir / "config.yaml").write_text("seed: 0\n")
    with logger(run_dir, start_step, total_steps) as running:
        for step in steps:
            running.count_step(loss=float(step), gradient_norm=1.0, images=1)
            running.record_training(step, 0.0, 0.1, 1.0)
        picture = {"val_pictures/a": np.zeros((4, 12, 3), np.uint8)}
        running.record_evaluation(steps[-1], 0.0, replace(evaluated(), pictures=picture))


def test_a_resumed_run_has_every_record_once(tmp_path):
    write_run(tmp_path, 0, [1, 2, 3, 4])
    (tmp_path / "metrics.jsonl").open("a").write('{"kind": "train", "st')  # the machine died here
    write_run(tmp_path, 2, [3, 4, 5])
    trained, resumed = [("train", step) for step in (1, 2, 3, 4, 5)], [("resumed", 2)]
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [*trained[:2], *resumed, *trained[2:], ("val", 5)]
    events = events_of(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert len(events.Tensors("config/text_summary")) == 1
    with logger(tmp_path, start_step=5, total_steps=5) as running:  # it is resumed at its end, which is evaluated again
        running.record_evaluation(5, 0.0, evaluated())
    assert [(r["kind"], r["step"]) for r in records(tmp_path)][5:] == [("train", 5), ("val", 5)]
    write_run(tmp_path, 0, [1])  # from the start: nothing of the first attempt is left
    assert [r["step"] for r in records(tmp_path)] == [1, 1]
    assert [event.step for event in events_of(tmp_path).Scalars("train/loss")] == [1]


def test_a_resumed_run_knows_the_scores_of_before(tmp_path):
    """They have the name of the task's score; NaN is never the best."""
    scores = {2: 0.25, 4: 0.75, 6: math.nan, 8: 0.5}
    for start_step in (0, 6):
        previous_scores = [(step, score) for step, score in scores.items() if step <= start_step]
        with MetricsLogger(tmp_path, Console(quiet=True), "top1", 10, start_step, previous_scores) as running:
            for step, score in scores.items():
                if step > start_step:
                    running.record_evaluation(step, 0.0, Evaluated({"top1": score, "miou": 1.0}, summary="", images=2))
            assert running.best[1] == 0.75 and list(running.scores) == list(scores)
            assert math.isnan(running.scores[6])
    assert [record["step"] for record in records(tmp_path) if record["kind"] == "val"] == [*scores]


def test_curves_and_pictures_have_the_names_of_the_evaluation(tmp_path):
    """Bytes of a file name that are not UTF-8 are escaped."""
    with logger(tmp_path) as running:
        picture = np.full((4, 12, 3), 7, np.uint8)
        running.record_evaluation(
            3, 0.5, replace(evaluated(), curves={"val/a": 0.5, "b": 2.0}, pictures={"seen/caf\udce9": picture})
        )
    events = events_of(tmp_path)
    points = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert points == {"val/a": [(3, 0.5)], "b": [(3, 2.0)]}
    assert events.Tags()["images"] == ["seen/caf\\udce9"]
    assert records(tmp_path) == [{"kind": "val", "step": 3, "epoch": 0.5, **SCORES}]
