"""What users read: scores as a table, JSON without NaN, errors as one message."""

import io
import json
import re
import resource
from pathlib import Path

import pytest
import torch
from rich.console import Console

from datasets import synthetic
from datasets.class_table import UnknownIds
from engine.reporting import (
    errors_for_users,
    iou_table,
    make_console,
    print_scores,
    progress_bar,
    tracked,
    write_results,
)

SCORES = {"miou": float("nan"), "iou": {"road": None}, "pixel_accuracy": float("nan")}
RESULTS = dict(
    scores=SCORES,
    confusion=torch.zeros(19, 19, dtype=torch.int64),
    images=0,
    views={},
    checkpoint=Path("last.pt"),
    config={},
)


def test_json_has_null_for_what_is_not_a_number(tmp_path):
    write_results(tmp_path / "results.json", dataset=synthetic(None, "val"), **RESULTS)
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["miou"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results_confusion.png"]


def test_a_full_disk_keeps_the_results_that_were_there(tmp_path):
    file, dataset = tmp_path / "results.json", synthetic(None, "val")
    file.write_text("those of before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # of which the kernel says about the same
    try:
        with pytest.raises(OSError):
            write_results(file, dataset=dataset, **RESULTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == "those of before"


def test_memory_that_runs_out_anywhere_is_a_message():
    with pytest.raises(SystemExit, match="error: out of memory, and not in a step or with an image: .*smaller body"):
        with errors_for_users():
            torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), errors_for_users():
        raise RuntimeError("another one")


def table_lines(scores: dict) -> list[list[str]]:
    """The words of each line of the table, without its frame."""
    console = Console(file=io.StringIO(), width=80)
    console.print(iou_table(scores))
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


def test_no_name_or_path_is_taken_for_an_instruction(capsys, monkeypatch):
    name = "[/x] [bold]:bug: \\"
    scores = {"miou": 0.5, "iou": {name: 0.5}, "pixel_accuracy": 0.75, "official": {}}
    print_scores(make_console(), scores, f"{name}/last.pt")
    make_console().print(f"results: {name}")
    output = capsys.readouterr().out
    assert f"{name}/last.pt" in output and f"│ {name} " in output and f"results: {name}" in output

    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    with progress_bar(make_console()) as progress:
        for _ in tracked(progress, [1], name):
            progress.refresh()
    assert name in capsys.readouterr().out


def test_users_see_the_message_of_a_worker_and_no_traceback(capsys):
    for kind, name in ((ValueError, "ValueError"), (UnknownIds, "datasets.class_table.UnknownIds")):
        caught = f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback\n  File"
        with pytest.raises(SystemExit) as exit_, errors_for_users():
            raise kind(f"{caught}\n{name}: a.png: is bad")
        assert exit_.value.code == "error: a.png: is bad"
    with pytest.raises(KeyError), errors_for_users():
        raise KeyError("our own mistake")
