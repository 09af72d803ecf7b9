"""Records of a run: speeds without pauses, no record twice, none lost; errors as one message."""

import io
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datasets import synthetic
from engine.reporting import RunReport, errors_for_users, iou_table, write_results

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


def test_json_has_null_for_what_is_not_a_number(tmp_path):
    scores = {"miou": float("nan"), "iou": {"road": None}, "pixel_accuracy": float("nan")}
    write_results(
        tmp_path / "results.json",
        dataset=synthetic(None, "val"),
        scores=scores,
        confusion=torch.zeros(19, 19, dtype=torch.int64),
        images=0,
        views={},
        checkpoint=Path("last.pt"),
        config={},
    )
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["miou"] is None


def table_lines(scores: dict) -> list[list[str]]:
    """The words of each line of the table, without its frame."""
    console = Console(file=io.StringIO(), width=80)
    console.print(iou_table(scores, title="title"))
    lines = console.file.getvalue().splitlines()
    return [words for line in lines if (words := [cell.strip() for cell in re.split("[│┃]", line) if cell.strip()])]


def test_official_scores_stand_beside_the_papers():
    paper = {"miou": 0.5, "iou": {"road": 0.5, "car": None}, "pixel_accuracy": 0.75}
    lines = table_lines({**paper, "official": {}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["car", "–"] in lines

    lines = table_lines({**paper, "official": {"miou": 0.25, "iou": {"road": 0.25, "car": 0.5, "other": 0.0}}})
    assert ["class", "IoU %", "official %"] in lines and ["mean (mIoU)", "50.00", "25.00"] in lines
    assert ["car", "–", "50.00"] in lines and ["other", "0.00"] in lines

    official = {
        **{"miou": 0.5, "iiou": {"car": 0.125}, "mean_iiou": 0.125, "mean_category_iou": 0.5},
        **{
            "category_iou": {"flat": 0.5, "vehicle": None},
            "category_iiou": {"vehicle": 0.2},
            "mean_category_iiou": 0.2,
        },
    }
    lines = table_lines({**paper, "official": official})
    assert ["mean (mIoU)", "50.00", "12.50"] in lines and ["car", "–", "12.50"] in lines
    assert ["flat", "50.00"] in lines and ["vehicle", "–", "20.00"] in lines
    assert not any("instanceIds" in line[0] for line in lines)
    lines = table_lines({**paper, "official": {**official, "iiou": {"car": None}, "mean_iiou": None}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["flat", "50.00"] in lines
    assert any("instanceIds" in line[0] for line in lines)


def test_users_see_the_message_of_a_worker_and_no_traceback(capsys):
    wrapped = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback\n  File\nValueError: a.png: is bad"
    with pytest.raises(SystemExit) as exit_, errors_for_users():
        raise ValueError(wrapped)
    assert exit_.value.code == "error: a.png: is bad"
    with pytest.raises(KeyError), errors_for_users():
        raise KeyError("our own mistake")
