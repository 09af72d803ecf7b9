"""The charts of all pages: bars and lines."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from engine.process.output_files import write_figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLACK, GREY, YELLOW, VERMILION, ORANGE = "#000000", "#999999", "#F0E442", "#D55E00", "#E69F00"
SKY, BLUE, PURPLE, GREEN = "#56B4E9", "#0072B2", "#CC79A7", "#009E73"


class Series(NamedTuple):
    """A line; bars have `y` alone."""

    label: str
    y: Sequence[float]
    x: Sequence[float] = ()
    colour: str | None = None  # None: the next one of matplotlib's
    style: str = "-"  # of lines, as matplotlib's format
    texts: Sequence[str] = ()  # above bars; an empty one is left out
    spread: Sequence[float] = ()  # of lines: deviation of each point, a band


def panels(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its panels; `options` are matplotlib's."""
    figure = Figure(figsize=inches, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def bars(axes: Axes, names: Sequence[str], shown: Sequence[Series], rotation: int = 0, **labels: Any) -> None:
    """A group of bars for each of `names`, which are written at an angle; a value of NaN has none."""
    places, width = np.arange(len(names)), 0.84 / len(shown)
    for number, series in enumerate(shown):
        middles = places + (number - (len(shown) - 1) / 2) * width
        drawn = axes.bar(middles, series.y, 0.92 * width, color=series.colour, label=series.label)
        if series.texts:
            axes.bar_label(drawn, series.texts, rotation=90, padding=3, fontsize=8)
    axes.set_xticks(places, names, rotation=rotation, ha="right" if rotation else "center")
    axes.margins(x=0.01, y=0.18 if any(series.texts for series in shown) else 0.05)
    _finish(axes, "y", labels)


def lines(axes: Axes, shown: Iterable[Series], **labels: Any) -> None:
    for series in shown:
        (line,) = axes.plot(series.x, series.y, series.style, color=series.colour, label=series.label, markersize=4)
        if series.spread:
            low, high = np.subtract(series.y, series.spread), np.add(series.y, series.spread)
            axes.fill_between(series.x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    _finish(axes, "both", labels)
    if axes.get_xscale() == "linear":
        axes.locator_params(axis="x", nbins=6)  # room for steps of five digits


def save(figure: Figure, file: Path) -> None:
    write_figure(file, figure, 110, few_colours=True)


def _finish(axes: Axes, grid: Literal["x", "y", "both"], labels: Mapping[str, Any]) -> None:
    axes.set(**labels)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":  # 20 and 100 instead of powers of ten
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, columns: int) -> None:
    """One legend above all panels, with each label once."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns, frameon=False)
