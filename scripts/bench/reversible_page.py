"""The chart of the page on reversible networks."""

from matplotlib.figure import Figure

from .frame import MIB

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
