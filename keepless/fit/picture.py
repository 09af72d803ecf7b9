"""Draw the memory of a step over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..saved import size_text
from .steps import Way, size_of

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"a picture needs matplotlib ({error}): pip install matplotlib") from error

_COLOURS = ("#999999", "#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, for the ways


def draw(ways: Sequence[Way], parts: Mapping[str, int], available: int, file: str | Path) -> None:
    """See `Fit.plot`. `parts`: bytes of what is always there, by name. `available`: bytes for tensors."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(available / 2**30, color="black", linestyle="--", label=f"{size_text(available)} for tensors")
    for way, colour in zip(ways, _COLOURS, strict=False):
        times, levels = zip((0.0, way.held), *way.levels, (way.time, way.held), strict=True)
        label = f"{way.name}: {size_text(way.peak)} for {size_of(way.shape)}"
        axes.step(times, [level / 2**30 for level in levels], where="post", color=colour, label=label)
    bottom = 0.0
    for number, (name, size) in enumerate(parts.items()):
        axes.axhspan(bottom, bottom := bottom + size / 2**30, color=str(0.6 + 0.12 * number), zorder=0, label=name)
    axes.set(xlabel="time, in plain steps (estimated)", ylabel="memory, GiB", xlim=(0, None), ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=150)
