"""results.json: JSON without NaN, either complete or unchanged."""

import json
from pathlib import Path

import pytest

from datasets import synthetic
from engine.records.evaluated import Evaluated, write_results
from tests.engine.checkpoint.test_files import files_of_at_most

SCORES = {"miou": float("nan"), "iou": {"road": None}, "pixel_accuracy": float("nan")}


def write(path: Path | None) -> dict:
    """Write the results of an evaluation without a labelled pixel."""
    evaluated = Evaluated(SCORES, summary="", images=0, details={"confusion_matrix": [[0]], "views": {}})
    return write_results(path, evaluated, synthetic(None, "val"), checkpoint=Path("last.pt"), config={})


def test_the_file_holds_what_is_returned_with_null_for_what_is_not_a_number(tmp_path):
    results, written_results = write(None), write(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text and json.loads(text)["miou"] is None
    assert results.keys() == written_results.keys() == json.loads(text).keys() >= {"confusion_matrix", "views"}
    assert results["checkpoint"] == "last.pt"


def test_a_full_disk_keeps_the_results_that_were_there(tmp_path):
    file = tmp_path / "results.json"
    file.write_text("old results")
    with files_of_at_most(100), pytest.raises(OSError):
        write(file)
    assert file.read_text() == "old results"
