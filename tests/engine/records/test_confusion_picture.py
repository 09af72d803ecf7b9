"""Pictures show the right numbers, and the names of classes literally, or their numbers."""

import warnings
from io import BytesIO

import numpy as np
import pytest
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


@pytest.fixture
def fonts_of_matplotlib(monkeypatch):
    """The machine's own fonts do not count."""
    own = [font for font in pictures.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(pictures.fontManager, "ttflist", own)
    pictures._family_with.cache_clear()
    yield
    pictures._family_with.cache_clear()


@pytest.mark.usefixtures("fonts_of_matplotlib")
def test_names_that_no_font_has_become_numbers_in_one_line(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(pictures.logger, "info", said.append)
    names = ("Straße", "天空", "하늘", "$a", "caf\udce9")
    figure = pictures.confusion_picture(np.eye(len(names), dtype=int), names, "天 $x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(BytesIO())
    found = {text.get_text() for text in figure.findobj(Text)}
    assert {"Straße", "1", "2", "$a", "caf\\udce9", "\\u5929 $x"} <= found and not {"天空", "하늘"} & found
    assert said == ["pictures show 2 classes by number: no font has the characters of 天空"]
