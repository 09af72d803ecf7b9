"""The GPU evidence, rehearsed on the CPU: what is written, and what it never looks like. None asserts a time."""

import json
from pathlib import Path

import pytest
import torch

from engine.configuration.command_line import composed
from scripts.evidence import check, layers
from scripts.gpu_evidence import PARTS, run
from scripts.reports import frame


def command(folder: Path, *words: str) -> str:
    """Run `python -m scripts.gpu_evidence`; return its tables."""
    return run(composed("gpu_evidence", f"out={folder}", *words))


def test_a_rehearsal_runs_and_says_what_it_is(in_process, monkeypatch, tmp_path):
    """A whole part: its record, tables and picture. They are made again from the record alone."""
    own = {"backend": "eager", "compiler": None, "groups": ["bn_act"]}  # Triton cannot be interpreted in this process
    monkeypatch.setitem(PARTS, "abn", PARTS["abn"]._replace(rehearsed=PARTS["abn"].rehearsed | own))
    text = command(tmp_path, "part=abn", "rehearse=true")
    (call,) = json.loads((tmp_path / "rehearsed_abn.json").read_text())["calls"]
    assert call["rehearsal"] and call["left"] == {}
    assert call["command"] == "python -m scripts.gpu_evidence part=abn rehearse=true out=DIR"
    rows = {row["strategy"]: row for row in frame.rows_of(call) if row.get("group") == "bn_act"}
    assert rows["in-place II"]["times_ms"][0] > 0 and rows["in-place II"]["captured_ms"][0] > 0
    assert f"**{frame.REHEARSED}**" in text and "| in-place II |" in text and "(rehearsed_abn.png)" in text
    drawn: list[str] = []
    monkeypatch.setattr(frame.charts, "save", lambda figure, file: drawn.extend(own.get_text() for own in figure.texts))
    assert command(tmp_path, "part=abn", "rehearse=true", "measure=false") == text
    assert drawn == ["REHEARSAL"] and (tmp_path / "rehearsed_abn.png").is_file()
    assert str(tmp_path) not in text + (tmp_path / "rehearsed_abn.json").read_text()
    assert not layers.picture(call).texts


def test_every_part_has_the_arguments_of_its_benchmark_and_names_what_it_measures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for part in PARTS.values():
        for own in (*part.calls, part.rehearsed):
            arguments = part.benchmark.schema(out="x.json", **own)
            assert part.benchmark.items(arguments)
    (of_layers,), (of_trainings,) = check.items(frame.Arguments()).values()
    assert "tests/keepless/norms/test_triton.py" in of_layers and "tests/test_train_seg.py" in of_trainings


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_line_of_every_part_runs(part, tmp_path):
    """The command runs each part in processes of its own; here with Triton's interpreter."""
    text = command(tmp_path, f"part={part}", "rehearse=true", "minutes=30")
    (call,) = json.loads((tmp_path / f"rehearsed_{part}.json").read_text())["calls"]
    assert call["left"] == {} and frame.REHEARSED in text
    if part == "exact":  # in float64 recomputed gradients are the plain network's
        exact = [row["error"] for row in frame.rows_of(call) if row["precision"] == "float64"]
        assert exact and max(exact) <= 1e-12 and "- float32: errors to float64 are at most " in text
