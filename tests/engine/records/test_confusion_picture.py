"""Pictures show the names of classes literally, or their numbers."""

import warnings
from io import BytesIO

import numpy as np
from matplotlib.text import Text

from engine.records import confusion_picture as pictures


def test_names_that_the_font_lacks_become_numbers_in_one_line(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(pictures.logger, "info", said.append)
    names = ("Straße", "天空", "하늘", "$a", "caf\udce9")
    figure = pictures.confusion_picture(np.eye(len(names), dtype=int), names, "天 $x")
    with warnings.catch_warnings(action="error"):
        figure.savefig(BytesIO())
    found = {text.get_text() for text in figure.findobj(Text)}
    assert {"Straße", "1", "2", "$a", "caf\\udce9", "? $x"} <= found and not {"天空", "하늘"} & found
    assert said == ["pictures show 2 classes by number: their font lacks characters of 天空"]
