"""Figures show the names of classes literally, or their numbers."""

import warnings
from io import BytesIO

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from scripts.reports import fonts


@pytest.fixture
def fonts_of_matplotlib(monkeypatch):
    """The machine's own fonts do not count."""
    own = [font for font in fonts.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(fonts.fontManager, "ttflist", own)
    fonts._family_with.cache_clear()
    yield
    fonts._family_with.cache_clear()


@pytest.mark.usefixtures("fonts_of_matplotlib")
def test_names_that_no_font_has_become_numbers_in_one_line(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(fonts.logger, "info", said.append)
    names = ("Straße", "天空", "하늘", "$a", "caf\udce9")
    figure = Figure()
    figure.suptitle("天 $x")
    figure.subplots().set_xticks(range(len(names)), fonts.shown_names(names))
    fonts.with_literal_texts(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(BytesIO())
    assert not any(text.get_parse_math() for text in figure.findobj(Text))
    found = {text.get_text() for text in figure.findobj(Text)}
    assert {"Straße", "1", "2", "$a", "caf\\udce9", "\\u5929 $x"} <= found and not {"天空", "하늘"} & found
    assert said == ["pictures show 2 classes by number: no font has the characters of 天空"]
