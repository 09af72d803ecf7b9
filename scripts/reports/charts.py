"""The chart style of all pages."""

import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from engine.process.output_files import write_figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLACK, GREY, YELLOW, VERMILION, ORANGE = "#000000", "#999999", "#F0E442", "#D55E00", "#E69F00"
SKY, BLUE, PURPLE, GREEN = "#56B4E9", "#0072B2", "#CC79A7", "#009E73"
METHOD_COLOURS = {  # one colour per method in all pictures: norms, `recomputed` by keepless, the compiler, and others
    **{"std": BLACK, "inplace": ORANGE, "inplace_1": YELLOW, "checkpoint": PURPLE, "checkpoint_xhat": GREEN},
    **{"recomputed": BLUE, "compiled": GREY, "compiled_budget": SKY, "other": VERMILION},
}
# Names in pictures are shown as they are: with their dollars, and in scripts that matplotlib's own font lacks.
OTHER_SCRIPTS = re.compile("CJK|Noto Sans|Droid Sans Fallback|WenQuanYi|Unifont")
TEXTS: Any = {
    "text.parse_math": False,
    "font.family": ["DejaVu Sans", *sorted({f.name for f in fontManager.ttflist if OTHER_SCRIPTS.search(f.name)})],
}
STYLE: Any = {
    **TEXTS,
    **{"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3},
    **{"axes.spines.top": False, "axes.spines.right": False},
}


def panels(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure and its panels."""
    figure = Figure(figsize=inches, layout="constrained")
    with matplotlib.rc_context(STYLE):
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Figure, file: Path) -> None:
    write_figure(file, figure, 110, few_colours=True)


def legend(figure: Figure, columns: int) -> None:
    """One legend above all panels, from the first one."""
    shown = figure.axes[0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside upper center", ncols=columns, frameon=False)
