"""Predictions stay in the folder that they were asked for, whatever the images are called."""

import numpy as np
import pytest
import torch

from datasets import ClassTable, SegmentationDataset
from engine.evaluation import PredictionWriter
from engine.pictures import class_legend, confusion_picture, inside, writable_folder

TABLE = ClassTable(("road", "sky"), ((1, 2, 3), (4, 5, 6)), (0, 1), {0: 0, 1: 1})


def written(tmp_path, name: str) -> list[str]:
    """What a prediction and an overlay of an image of this name leave below `tmp_path`."""
    dataset = SegmentationDataset("streets", "val", [(name, tmp_path / "image.png", None)], TABLE)
    writer = PredictionWriter(dataset, tmp_path / "out" / "predictions", tmp_path / "out" / "overlays", None)
    image = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    writer({"name": [name], "index": torch.tensor([0]), "image": image}, torch.zeros(1, 2, 2, dtype=torch.uint8))
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["a", "city/a", "..a", "city/../a", "a b\\..\\c"])
def test_names_within_the_folder_are_written(tmp_path, name):
    file = f"{name}.png".replace("city/../", "")
    assert written(tmp_path, name) == [f"out/overlays/{file}", f"out/predictions/{file}"]


@pytest.mark.parametrize("name", ["../a", "../../a", "city/../../a", "../predictions_of_others/a", "{tmp}/a", "a\0"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError):
        written(tmp_path, name.format(tmp=tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_links_that_leave_the_folder_are_refused(tmp_path):
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    (folder / "city").symlink_to(elsewhere)
    (folder / "a.png").symlink_to(elsewhere / "a.png")
    for name in ("city/a.png", "a.png", "city", ".", ""):
        with pytest.raises(ValueError, match="outside of"):
            inside(folder, name)
    (tmp_path / "linked").symlink_to(folder)  # the user's own choice
    assert inside(tmp_path / "linked", "b.png") == folder / "b.png"


def test_the_message_names_the_image_and_both_places(tmp_path):
    with pytest.raises(
        ValueError, match=r"name '\.\./a\.png' would be written to .*/a\.png, outside of .*/predictions"
    ):
        written(tmp_path, "../a")
    assert not list(tmp_path.iterdir())


def test_confusion_picture_shows_shares_of_each_label():
    """Rows in percent; cells below half a percent are empty, and so is the row of a class without labels."""
    confusion = np.array([[750, 249, 1], [0, 0, 0], [1, 0, 3]])
    axes, *_ = confusion_picture(confusion, ("road", "sky", "car"), "streets val").axes
    written = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "75", (0, 1): "25", (2, 0): "25", (2, 2): "75"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["road", "sky", "car"]
    assert axes.get_ylabel() == "label" and axes.get_xlabel() == "predicted"


def test_names_of_classes_are_no_formulas(tmp_path):
    names = ("$\\nothing$", "$")
    confusion_picture(np.eye(2, dtype=int), names, "streets $\\val$").savefig(tmp_path / "confusion.png")
    dataset = SegmentationDataset("streets", "val", [], ClassTable(names, TABLE.palette, (0, 1), {0: 0, 1: 1}))
    class_legend(dataset).savefig(tmp_path / "legend.png")


def test_a_folder_that_cannot_be_written_to_is_named_with_its_key(tmp_path):
    assert writable_folder("predictions", tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "a", "Not a directory")):
        expected = rf"predictions: {folder} is not a folder to write to \({reason}\); give predictions="
        with pytest.raises(ValueError, match=expected):
            writable_folder("predictions", folder)
