"""Charts of the page on reversible networks, and its section on memory against time."""

import statistics
from collections.abc import Iterator

from matplotlib.figure import Figure

from scripts.bench.frame import MIB, ratio_of, table

COLOURS = {"naive": "C7", "blocks": "C1", "sqrt": "C4", "recursive": "C2", "reversible": "C0"}


def chart(rows: list[dict]) -> Figure:
    """What each method keeps, its peak and its operations, over the number of units."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    naive = {row["units"]: row["flops"] for row in rows if row["method"] == "naive"}
    columns = (
        ("kept for the backward pass, MiB", lambda row: row["kept_bytes"] / MIB),
        ("peak of a step, MiB", lambda row: row["peak_bytes"] / MIB),
        ("operations to naive", lambda row: row["flops"] / naive[row["units"]]),
    )
    for number, (axis, (title, value)) in enumerate(zip(axes, columns, strict=True)):
        for method, colour in COLOURS.items():
            chosen = [row for row in rows if row["method"] == method]
            axis.plot(
                [row["units"] for row in chosen], [value(row) for row in chosen], "o-", color=colour, label=method
            )
        axis.set_xscale("log", base=2)
        if number < 2:
            axis.set_yscale("log")
        axis.set(title=title, xlabel="units")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


BASE = "ResNet-110, std"


def budget_section(rows: list[dict], picture: str) -> Iterator[str]:
    """The table of memory against time, least memory first."""
    base = next(row["times_ms"] for row in rows if row["method"] == BASE)
    lines = [
        [
            row["method"],
            "" if row["kept_bytes"] is None else f"{row['kept_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{ratio_of(row['times_ms'], base):.2f}",
        ]
        for row in sorted(rows, key=lambda row: row["peak_bytes"])
    ]
    yield from ("", "## Memory against time", "", f"![memory against time]({picture})", "")
    yield from table(["method", "kept, MiB", "peak, MiB", "time to standard"], lines)


def budget_chart(rows: list[dict]) -> Figure:
    """Peak memory and time of a step of every method."""
    base = next(row["times_ms"] for row in rows if row["method"] == BASE)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        ratio = statistics.median(ours / other for ours, other in zip(row["times_ms"], base, strict=True))
        colour = "C0" if "reversible" in row["method"] else "C3" if "compiled" in row["method"] else "C1"
        marker = "s" if "inplace" in row["method"] else "o"
        axis.plot(row["peak_bytes"] / MIB, ratio, marker, color=colour)
        axis.annotate(
            row["method"], (row["peak_bytes"] / MIB, ratio), xytext=(5, 4), textcoords="offset points", fontsize=8
        )
    axis.set(xscale="log", xlabel="peak of a step, MiB", ylabel="time of a step to standard")
    least, most = axis.get_xlim()
    axis.set_xlim(least / 1.2, 2.5 * most)  # room for the names
    axis.grid(alpha=0.3)
    return figure
