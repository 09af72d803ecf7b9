"""The script makes the index that a training with class-uniform sampling looks for."""

import os

import numpy as np
import pytest

from datasets import ClassIndex, SegmentationDataset, index_classes, synthetic
from scripts.build_class_index import index
from scripts.verify_data import verify_data
from tests import trees
from tests.runs import composed


def test_a_training_finds_what_the_script_made(tmp_path, monkeypatch, capsys):
    made = index(composed("build_class_index", "data=synthetic", f"folder={tmp_path}", "positions=3", "workers=2"))
    assert isinstance(made, ClassIndex) and len(made) == 200
    monkeypatch.setattr(SegmentationDataset, "read_label", lambda *_: pytest.fail("a label was read again"))
    found = index_classes(synthetic(None, "train"), tmp_path, positions=3)
    assert np.array_equal(found.counts, made.counts) and np.array_equal(found.places, made.places)
    lines = capsys.readouterr().out.splitlines()
    (road,) = (line for line in lines if "road" in line)
    assert f"{made.counts[:, 0].sum():,}" in road and "200" in road


@pytest.mark.parametrize("command, make", [("build_class_index", index), ("verify_data", verify_data)])
def test_a_file_that_blocks_its_reader_ends_the_command(tmp_path, command, make):
    label = next(trees.cityscapes(tmp_path / "data").rglob("gtFine/train/*/*labelIds.png"))
    label.unlink()
    os.mkfifo(label)
    keys = ("data=cityscapes", f"data.root={tmp_path / 'data'}", "data.timeout_seconds=1", "workers=1")
    with pytest.raises(TimeoutError, match="no data came for data.timeout_seconds=1 seconds"):
        make(composed(command, *keys))
