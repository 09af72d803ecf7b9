"""Pictures show the right numbers, and the names of classes literally, or their numbers."""

import warnings
from io import BytesIO

import numpy as np
from matplotlib.text import Text

from engine.records import confusion_picture as pictures


def test_confusion_picture_shows_shares_of_each_label():
    """Rows in percent; cells below half a percent are empty, and so is the row of a class without labels."""
    confusion = np.array([[750, 249, 1], [0, 0, 0], [1, 0, 3]])
    axes, *_ = pictures.confusion_picture(confusion, ("road", "sky", "car"), "streets val").axes
    written = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "75", (0, 1): "25", (2, 0): "25", (2, 2): "75"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["road", "sky", "car"]
    assert axes.get_ylabel() == "label" and axes.get_xlabel() == "predicted"


def test_names_that_the_font_lacks_become_numbers_in_one_line(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(pictures.logger, "info", said.append)
    names = ("Straße", "天空", "하늘", "$a", "caf\udce9")
    figure = pictures.confusion_picture(np.eye(len(names), dtype=int), names, "天 $x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(BytesIO())
    found = {text.get_text() for text in figure.findobj(Text)}
    assert {"Straße", "1", "2", "$a", "caf\\udce9", "? $x"} <= found and not {"天空", "하늘"} & found
    assert said == ["pictures show 2 classes by number: their font lacks characters of 天空"]
