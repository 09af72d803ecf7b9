"""Records of a run: speeds without pauses, no record twice, none lost."""

import json
import time

import numpy as np
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.run_report import RunReport

SCORES = {"miou": 0.5, "iou": {"road": 0.5, "sky": None}, "pixel_accuracy": 0.75}


def report(run_dir, start_step=0, total_steps=10) -> RunReport:
    return RunReport(run_dir, Console(quiet=True), total_steps, start_step)


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_images_per_second_do_not_count_pauses(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 2.0, 100.0, 102.0])  # made, entered, step, end of the pause, step
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with report(tmp_path) as running:
        running.step(loss=1.0, gradient_norm=2.0, images=8)
        running.pause_ended()
        running.step(loss=3.0, gradient_norm=5.0, images=8)
        running.training(step=2, epoch=0.5, lr=0.1, peak_memory_mib=64.0)
    assert records(tmp_path) == [
        {
            **{"kind": "train", "step": 2, "epoch": 0.5, "loss": 2.0, "lr": 0.1},
            **{"gradient_norm": 3.5, "images_per_second": 4.0, "peak_memory_mib": 64.0},
        }
    ]


def write_run(run_dir, start_step, steps, total_steps=10):
    with report(run_dir, start_step, total_steps) as running:
        for step in steps:
            running.step(loss=float(step), gradient_norm=1.0, images=1)
            running.training(step, 0.0, 0.1, 1.0)
        running.evaluation(steps[-1], 0.0, SCORES, {"a": np.zeros((4, 12, 3), np.uint8)})


def test_a_resumed_run_has_every_record_once(tmp_path):
    write_run(tmp_path, 0, [1, 2, 3, 4])
    (tmp_path / "metrics.jsonl").open("a").write('{"kind": "train", "st')  # the machine stopped here
    write_run(tmp_path, 2, [3, 4, 5])
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [("train", s) for s in (1, 2, 3, 4, 5)] + [("val", 5)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_a_run_that_starts_again_leaves_nothing_of_the_first_attempt(tmp_path):
    write_run(tmp_path, 0, [1, 2])
    write_run(tmp_path, 0, [1])
    assert [r["step"] for r in records(tmp_path)] == [1, 1]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1]


def test_a_finished_run_has_one_final_evaluation_however_often_it_is_resumed(tmp_path):
    write_run(tmp_path, 0, [9, 10])
    for _ in range(2):
        with report(tmp_path, start_step=10) as running:
            running.evaluation(10, 0.0, SCORES, {})
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [("train", 9), ("train", 10), ("val", 10)]
