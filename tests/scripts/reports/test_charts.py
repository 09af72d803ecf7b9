"""The charts of all pages show what they are given."""

import math

from scripts.reports import charts
from scripts.reports.charts import Series


def test_bars_stand_beside_each_other_and_a_missing_value_has_none():
    figure, (axes, other) = charts.panels(1, 2, (6, 3))
    shown = [Series("a", [1.0, 2.0], texts=["", "x"]), Series("b", [3.0, math.nan])]
    charts.bars(axes, ["left", "right"], shown, ylabel="ms")
    first, second = axes.containers
    assert [bar.get_height() for bar in first] == [1.0, 2.0] and second[0].get_height() == 3.0
    assert math.isnan(second[1].get_height()) and first[0].get_x() + first[0].get_width() <= second[0].get_x()
    assert [text.get_text() for text in axes.texts] == ["", "x"] and axes.get_ylabel() == "ms"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["left", "right"]
    charts.bars(other, ["left"], [Series("b", [1.0])])
    charts.legend(figure, columns=2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_lines_are_where_their_values_are():
    _, (axes,) = charts.panels(1, 1, (3, 3))
    charts.lines(axes, [Series("a", [1.0, 4.0], [0, 2])], title="over steps")
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[0, 1], [2, 4]] and axes.get_title() == "over steps"
