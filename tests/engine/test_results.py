"""results.json: JSON without NaN, either complete or unchanged."""

import json
import resource
from functools import partial
from pathlib import Path

import pytest
import torch

from datasets import synthetic
from engine.confusion_picture import confusion_picture
from engine.evaluated import Evaluated
from engine.results import write_results

SCORES = {"miou": float("nan"), "iou": {"road": None}, "pixel_accuracy": float("nan")}


def write(path: Path | None) -> dict:
    """Write the results of an evaluation without a labelled pixel."""
    dataset, confusion = synthetic(None, "val"), torch.zeros(19, 19, dtype=torch.int64)
    evaluated = Evaluated(
        SCORES,
        summary="",
        images=0,
        details={"confusion_matrix": confusion.tolist(), "views": {}},
        confusion=partial(confusion_picture, confusion.numpy(), dataset.classes, "synthetic val"),
    )
    return write_results(path, evaluated, dataset, checkpoint=Path("last.pt"), config={})


def test_json_has_null_for_what_is_not_a_number(tmp_path):
    write(tmp_path / "results.json")
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["miou"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results_confusion.png"]


def test_the_file_holds_what_is_returned(tmp_path):
    """Scores and details, data, checkpoint, configuration, hardware, versions and commit."""
    results, written = write(None), write(tmp_path / "results.json")
    assert results.keys() == written.keys() == json.loads((tmp_path / "results.json").read_text()).keys()
    assert results.keys() == {
        *("dataset", "split", "images", "checkpoint", "config", "environment"),
        *("miou", "iou", "pixel_accuracy", "confusion_matrix", "views"),
    }
    assert results["environment"].keys() == {"hardware", "versions", "commit"}
    assert (results["dataset"], results["split"], results["checkpoint"]) == ("synthetic", "val", "last.pt")


def test_a_full_disk_keeps_the_results_that_were_there(tmp_path):
    file = tmp_path / "results.json"
    file.write_text("old results")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # much like a full disk
    try:
        with pytest.raises(OSError):
            write(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == "old results"
