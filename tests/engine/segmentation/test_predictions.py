"""Predictions stay in the folder that they were asked for, whatever the images are called."""

import re

import pytest
import torch

from datasets import ClassTable, SegmentationDataset
from datasets.segmentation import Files
from engine.segmentation.predictions import PredictionWriter

TABLE = ClassTable(("road", "sky"), ((1, 2, 3), (4, 5, 6)), (0, 1), {0: 0, 1: 1})


def written(tmp_path, name: str) -> list[str]:
    """The files below `tmp_path` after the prediction and overlay of an image of this name."""
    dataset = SegmentationDataset("streets", "val", [Files(name, tmp_path / "image.png")], TABLE)
    writer = PredictionWriter(dataset, tmp_path / "out" / "predictions", tmp_path / "out" / "overlays")
    image = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    writer({"name": [name], "image": image}, torch.zeros(1, 2, 2, dtype=torch.uint8))
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["a", "city/a", "..a", "city/../a", "a b\\..\\c"])
def test_names_within_the_folder_are_written(tmp_path, name):
    file = f"{name}.png".replace("city/../", "")
    assert written(tmp_path, name) == [f"out/overlays/{file}", f"out/predictions/{file}"]


@pytest.mark.parametrize("name", ["../a", "../../a", "city/../../a", "../predictions_of_others/a", "{tmp}/a", "a\0"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    name = name.format(tmp=tmp_path)
    both_places = rf"name '{re.escape(name)}\.png' would be written to .*/a\.png, outside of .*/predictions"
    with pytest.raises(ValueError, match="null" if "\0" in name else both_places):
        written(tmp_path, name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
