"""Pictures show the names of classes in any alphabet that an installed font has."""

import warnings
from io import BytesIO
from types import SimpleNamespace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from engine.records import confusion_picture as pictures


def drawn(names: tuple[str, ...]) -> dict[str, list[str]]:
    """The fonts of every text in a picture of a confusion matrix, which is drawn without a warning."""
    pictures._fonts_for.cache_clear()
    figure = pictures.confusion_picture(np.eye(len(names), dtype=int), names, "天 $x")
    with warnings.catch_warnings(action="error"):
        figure.savefig(BytesIO())
    return {text.get_text(): text.get_fontfamily() for text in pictures.with_literal_texts(figure).findobj(Text)}


def test_names_without_a_font_become_numbers_in_one_line(monkeypatch):
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if font.name == "DejaVu Sans"])
    said: list[str] = []
    monkeypatch.setattr(pictures.logger, "info", lambda message, *values: said.append(message % values))
    found = drawn(("Straße", "天空", "하늘", "$a"))
    assert {"Straße", "1", "2", "$a", "? $x"} <= found.keys() and not {"天空", "하늘"} & found.keys()
    assert len(said) == 1 and "2 classes by number" in said[0]


def test_names_are_shown_in_a_font_that_has_them(monkeypatch):
    """Of two installed fonts, each of which has some of the characters."""
    characters = {"own": {*"road 12"}, "chinese": {*"天空"}, "korean": {*"하늘"}}
    pictures._fonts_for.cache_clear()
    monkeypatch.setattr(fontManager, "ttflist", [SimpleNamespace(fname=name, name=name.title()) for name in characters])
    monkeypatch.setattr(pictures, "_characters", characters.__getitem__)
    monkeypatch.setattr(pictures, "findfont", lambda properties: "own")
    assert pictures.shown_names(("road", "天空", "하늘 1", "空", "x")) == ["road", "天空", "하늘 1", "空", "4"]
    assert pictures._fonts_for("하늘天") == ("Chinese", "Korean")
    figure = Figure()
    figure.text(0, 0, "天空")
    (text,) = pictures.with_literal_texts(figure).texts
    assert text.get_text() == "天空" and text.get_fontfamily()[-1] == "Chinese"
    pictures._fonts_for.cache_clear()
