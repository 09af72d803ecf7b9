"""Draw the memory of a step over time."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..saved import size_text
from .steps import size_of

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"a picture needs matplotlib ({error}): pip install matplotlib") from error

if TYPE_CHECKING:
    from .fit import Fit

_COLOURS = ("#999999", "#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, for the ways


def draw(fit: "Fit", file: str | Path) -> None:
    """See `Fit.plot`."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(fit.available / 2**30, color="black", linestyle="--", label=f"device: {size_text(fit.available)}")
    for way, colour in zip(fit.ways, _COLOURS, strict=False):
        times, levels = zip((0.0, way.held), *way.levels, (way.time, way.held), strict=True)
        label = f"{way.name}: {size_text(way.peak)} for {size_of(way.shape)}"
        axes.step(times, [level / 2**30 for level in levels], where="post", color=colour, label=label)
    parts = {"weights": fit.weights, "gradients": fit.gradients, "optimiser": fit.states}
    bottom = 0.0
    for number, (name, size) in enumerate(parts.items()):
        axes.axhspan(bottom, bottom := bottom + size / 2**30, color=str(0.6 + 0.12 * number), zorder=0, label=name)
    axes.set(xlabel="time, in plain steps (estimated)", ylabel="memory, GiB", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)
