"""The charts of all pages show what they are given."""

import math

from scripts.reports import charts

COLOURS = {"a": charts.BLACK, "b": charts.BLUE}


def test_bars_stand_beside_each_other_and_a_missing_value_has_none():
    figure, (axes, other) = charts.panels(1, 2, (6, 3))
    shown = {"a": [1.0, 2.0], "b": [3.0, math.nan]}
    charts.bars(axes, ["left", "right"], shown, COLOURS, {"a": ["", "x"]}, ylabel="ms")
    first, second = axes.containers
    assert [bar.get_height() for bar in first] == [1.0, 2.0] and second[0].get_height() == 3.0
    assert math.isnan(second[1].get_height()) and first[0].get_x() + first[0].get_width() <= second[0].get_x()
    assert [text.get_text() for text in axes.texts] == ["", "x"] and axes.get_ylabel() == "ms"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["left", "right"]
    charts.bars(other, ["left"], {"b": [1.0]}, COLOURS, {})
    charts.legend(figure, columns=2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
