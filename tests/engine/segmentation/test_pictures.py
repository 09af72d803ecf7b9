"""The picture of a confusion matrix shows the right numbers, and the names of classes as they are."""

import numpy as np

from engine.records.confusion_picture import confusion_picture


def test_confusion_picture_shows_shares_of_each_label():
    """Rows in percent; cells below half a percent are empty, and so is the row of a class without labels."""
    confusion = np.array([[750, 249, 1], [0, 0, 0], [1, 0, 3]])
    axes, *_ = confusion_picture(confusion, ("road", "sky", "car"), "streets val").axes
    written = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "75", (0, 1): "25", (2, 0): "25", (2, 2): "75"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["road", "sky", "car"]
    assert axes.get_ylabel() == "label" and axes.get_xlabel() == "predicted"


def test_names_of_classes_are_no_formulas(tmp_path):
    names = ("$\\nothing$", "caf\udce9")  # a folder's name that is not UTF-8
    confusion_picture(np.eye(2, dtype=int), names, "streets $\\val$").savefig(tmp_path / "confusion.png")
