"""The page and the chart of `abn`, made from its record alone."""

import math
import statistics
from collections.abc import Collection, Iterable

from matplotlib.figure import Figure

from scripts.evidence import frame
from scripts.evidence.abn_strategies import (
    BLOCKS,
    BUDGET,
    CHECKPOINTING_B,
    CHECKPOINTING_C,
    COMPILED,
    COPY,
    INPLACE_1,
    INPLACE_2,
    INPLACE_COMPILED,
    PACKAGE,
    STANDARD,
)
from scripts.evidence.frame import mib, ratio_of, time_ratio
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns, section, table

Rows = dict[str, dict]  # of one cell, by strategy


def by_cell(rows: list[dict]) -> list[Rows]:
    return list(frame.grouped(rows, ("group", "shape", "layout", "dtype"), "strategy").values())


def by_kind(cells: Iterable[Rows]) -> dict[str, list[Rows]]:
    """The cells of each group, layout and dtype, by their title."""
    kinds: dict[str, list[Rows]] = {}
    for cell in cells:
        standard = cell[STANDARD]
        title = f"{TITLES[standard['group']]}, {standard['layout']}, {standard['dtype']}"
        kinds.setdefault(title, []).append(cell)
    return kinds


def comparison(cells: list[Rows]) -> str:
    """In-place II beside its rivals and beside the paper, and where it is behind."""
    lines = []
    for group, title in TITLES.items():
        if ratios := _ratios(_of_group(group, cells, {INPLACE_2})):
            lines.append(f"- {title}: {_range(ratios.values())} of standard's time. Longer: {frame.longer(ratios)}.")
    if released := list(map(_to_package, _of_group("bn_act", cells, {PACKAGE, COPY, INPLACE_2}))):
        times = f"{_range(released)} of the released package's time, without the time to copy its input"
        lines.append(f"- {TITLES['bn_act']}: {times}.")
    if complete := _of_group("bn_act_conv", cells, {*PAPER}):
        medians = {name: statistics.median(_ratios(complete, name).values()) - 1 for name in PAPER}
        overheads = ", ".join(f"{name} {100 * median:+.1f} %" for name, median in medians.items())
        lines.append(f"- Overhead over standard, {TITLES['bn_act_conv']}, medians: {overheads}. {OF_THE_PAPER}")
    for cell in _of_group("network", cells, {COMPILED, INPLACE_COMPILED}):
        time = time_ratio(cell, INPLACE_COMPILED, COMPILED).median
        share = cell[INPLACE_COMPILED]["saved_bytes"] / cell[COMPILED]["saved_bytes"]
        lines.append(f"- {TITLES['network']}, both compiled: {time:.2f} of standard's time, {share:.3f} of its bytes.")
    return section("In-place II", "\n".join(lines)) if lines else ""


def _of_group(group: str, cells: list[Rows], strategies: set[str]) -> list[Rows]:
    """The cells of a group that have all these strategies."""
    return [cell for cell in cells if cell[STANDARD]["group"] == group and strategies <= cell.keys()]


def _range(values: Collection[float]) -> str:
    return " – ".join(sorted({f"{min(values):.2f}", f"{max(values):.2f}"}))


def _ratios(cells: list[Rows], ours: str = INPLACE_2) -> dict[str, float]:
    """Time relative to standard, by cell name."""
    names = [" ".join(cell[STANDARD][part] for part in ("shape", "layout", "dtype")) for cell in cells]
    return {name: time_ratio(cell, ours, STANDARD).median for name, cell in zip(names, cells, strict=True)}


def _to_package(cell: Rows) -> float:
    """Ratio to the package, without the time to copy x: after a convolution the package would need no copy."""
    pairs = zip(cell[PACKAGE]["times_ms"], cell[COPY]["times_ms"], strict=True)
    package_ms = [max(package - copy, 1e-6) for package, copy in pairs]
    return ratio_of(cell[INPLACE_2]["times_ms"], package_ms).median


TITLES = {
    "bn_act": "BN + ACT",
    "bn_act_conv": "BN + ACT + CONV",
    "network": "Small whole network",
    "host": "Host time of BN + ACT",
    "host_eval": "Host time of BN + ACT, inference",
}

PAPER = (INPLACE_2, INPLACE_1, CHECKPOINTING_C, CHECKPOINTING_B)
OF_THE_PAPER = (
    f"In the paper, overheads rise in this order: {CHECKPOINTING_B} has almost twice the overhead of in-place I."
)

COLOURS = {
    STANDARD: charts.BLACK,
    COMPILED: charts.GREY,
    BUDGET: charts.YELLOW,
    CHECKPOINTING_B: charts.VERMILION,
    CHECKPOINTING_C: charts.ORANGE,
    INPLACE_1: charts.SKY,
    INPLACE_2: charts.BLUE,
    PACKAGE: charts.PURPLE,
}


STEPS = (
    "BN + ACT (+ CONV): time and memory of every strategy",
    "For those who choose a norm: what normalisation, activation and the convolution after them take in a step, and "
    "keep for the backward pass. It is the paper's Figure 4, with its strategies (Figure 2) and their rivals.",
)
HOST = (
    "Host time of BN + ACT",
    "For those who train small tensors, or on a fast device: the time of a layer in Python and in operators' dispatch.",
)


def page(result: dict, name: str) -> str:
    title, about = HOST if all(row["group"].startswith("host") for row in result["rows"]) else STEPS
    return frame.page_text(
        "abn",
        result,
        title=title,
        about=about,
        device=frame.DEVICES[result["arguments"]["device"]],
        sections=sections_of(result["rows"], result["left_out"], name),
    )


def sections_of(rows: list[dict], left_out: list[dict], name: str) -> list[str]:
    """The page's sections; `name`: of the chart's file, without .png."""
    sections = [comparison(by_cell(rows))]
    if any(map(_replayed, rows)):
        sections.append(frame.prose("parts/replays"))
    if _shapes(rows):
        about = "Time relative to standard, median over CONV1 to CONV4, and activation-sized buffers kept:"
        picture = (
            f"![time of a forward and backward pass of each strategy]({name}.png)\n"
            "*Numbers above bars: time relative to standard.*"
        )
        sections.append(section("Summary", about, summary(rows), picture))
    for title, cells in by_kind(by_cell(rows)).items():
        own = [row for cell in cells for row in cell.values()]
        shown = [*COLUMNS, *(OF_REPLAYS if any(map(_replayed, own)) else ())]
        sections.append(section(title, columns(own, shown, left=3)))
    return [*sections, *_left_out(left_out)]


def _shapes(rows: list[dict]) -> list[Rows]:
    """The cells CONV1 … CONV4."""
    return [cell for cell in by_cell(rows) if cell[STANDARD]["shape"].startswith("CONV")]


def summary(rows: list[dict]) -> str:
    """Every strategy's time to standard, median over CONV1 … CONV4, and the buffers it keeps."""
    kinds = by_kind(_shapes(rows))

    def entry(name: str, cells: list[Rows]) -> str:
        found = [cell[name] for cell in cells if name in cell]
        if not found:
            return ""
        ratio = statistics.median(row["ratio"] for row in found)
        return f"{ratio:.2f}, {round(found[0]['saved_buffers'])} kept"

    lines = ([name, *(entry(name, cells) for cells in kinds.values())] for name in COLOURS)
    return table(["strategy", *kinds], (line for line in lines if any(line[1:])))


def _size(row: dict) -> str:
    return "x".join(map(str, row["size"]))


def _ratio(row: dict) -> str:
    return "1" if row["strategy"] == STANDARD else f"{frame.Ratio(row['ratio'], *row['ratio_quartiles']):.2f}"


def _saved_to_standard(row: dict) -> str:
    return "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / row['beside'][STANDARD]['saved_bytes']:.3f}"


def _buffers(row: dict) -> str:
    return "" if row["saved_buffers"] is None or row["group"] == "network" else f"{row['saved_buffers']:g}"


COLUMNS: Columns = [
    ("shape", lambda row: f"{row['shape']} {_size(row)}" if row["strategy"] == STANDARD else ""),
    ("strategy", "{strategy}"),
    ("backend", lambda row: row["backend"] or ""),
    ("ms", "{median_ms:.3f}"),
    ("/ standard", _ratio),
    ("saved MiB", lambda row: mib(row["saved_bytes"], 2)),
    ("/ standard", _saved_to_standard),
    ("buffers", _buffers),
    ("peak MiB", lambda row: mib(row["peak_bytes"], 2)),
]
OF_REPLAYS: Columns = [
    ("replayed ms", lambda row: f"{row['replay_ms']:.3f}" if _replayed(row) else ""),
    ("/ standard", lambda row: f"{row['replay_ratio']:.2f}" if "replay_ratio" in row else ""),
]


def _replayed(row: dict) -> bool:
    return "replay_ms" in row


def _left_out(entries: list[dict]) -> list[str]:
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        cells.setdefault((entry["strategy"], entry["reason"]), []).append(entry["cell"])
    lines = []
    for (strategy, reason), names in cells.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cells, {names[0]} to {names[-1]}"
        lines.append(f"- {strategy} ({where}): {reason}")
    return [section("Not measured", "\n".join(lines))] if lines else []


def pictures(result: dict) -> dict[str, Figure]:
    """Figure 4: a panel for each layout and dtype, bars for each shape, labelled with the ratio to standard.

    There is none without CONV1 … CONV4, as if only host time was measured.
    """
    cells = by_cell(result["rows"])
    groups = {group: [cell for cell in cells if cell[STANDARD]["group"] == group] for group in BLOCKS}
    kinds = by_kind(groups["bn_act_conv"] or groups["bn_act"])
    if not _shapes(result["rows"]):
        return {}
    figure, panels = charts.panels(len(kinds), 1, (12, 0.8 + 3.4 * len(kinds)))
    for axes, (title, cells) in zip(panels, kinds.items(), strict=True):
        names = [f"{cell[STANDARD]['shape']}\n{_size(cell[STANDARD])}" for cell in cells]
        series = []
        for strategy, colour in COLOURS.items():
            found = [cell.get(strategy, {}) for cell in cells]
            if any(found):
                times_ms = [row.get("median_ms", math.nan) for row in found]
                ratios = [f"{row['ratio']:.2f}" if row and strategy != STANDARD else "" for row in found]
                series.append(charts.Series(strategy, times_ms, colour=colour, texts=ratios))
        charts.bars(axes, names, series, title=title, ylabel="forward + backward, ms")
    charts.legend(figure, columns=4)
    return {"": figure}
