"""The page and the chart of `abn`, made from its record alone."""

import math
import statistics
from collections.abc import Iterable

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
from scripts.evidence.frame import MIB, MISS, PASS, Target, judged, mib, ratio_of, time_ratio
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns, section, table

SHOWN, PASS_IN_PART = "shown", "reached where measured"

# Forward: read x for the statistics, read x, write z. Backward: read z and dz for the sums, read both, write dx.
PASSES_OVER_MEMORY = 8
PASSES_OF_A_COPY = 2

Rows = dict[str, dict]  # of one cell, by strategy
EAGER = f"{INPLACE_2}, eager backend"


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


def targets(rows: list[dict], left_out: list[dict]) -> list[Target]:
    """All targets. If in-place II is missing in a cell, a target is at most reached where measured."""
    missing = any(entry["strategy"] in ("all", STANDARD, INPLACE_2) for entry in left_out)
    return [
        target._replace(verdict=PASS_IN_PART) if missing and target.verdict == PASS else target
        for target in _targets(by_cell(rows))
    ]


def _targets(cells: list[Rows]) -> list[Target]:
    measured = [cell for cell in cells if INPLACE_2 in cell]

    def chosen(group: str, **wanted: str) -> list[Rows]:
        wanted["group"] = group
        return [cell for cell in measured if all(cell[STANDARD][key] == value for key, value in wanted.items())]

    nchw, nhwc = (chosen("bn_act", device="cpu", layout=layout) for layout in ("contiguous", "channels_last"))
    cuda, blocks = chosen("bn_act", device="cuda"), chosen("bn_act_conv", device="cuda")
    alone, cpu = "BN+ACT, CUDA, in-place II", "BN+ACT, CPU, in-place II, `backend=auto`"
    eager = "BN+ACT, CPU, in-place II, eager backend"
    packages = [cell for cell in chosen("bn_act") if PACKAGE in cell]
    against_package = "in-place II against the released package"
    share = PASSES_OVER_MEMORY / PASSES_OF_A_COPY
    bandwidth = {_name(c): share / time_ratio(c, INPLACE_2, COPY).median for c in cuda if _mib(c) > 256}
    return [
        _saved(chosen("bn_act_conv")),
        _order(chosen("bn_act_conv")),
        judged(alone, "at most 0.70 where standard takes over 100 µs", _ratios(filter(_is_slow, cuda)), at_most=0.7),
        judged(f"{alone}, above 256 MiB", "0.75 of measured copy bandwidth", bandwidth, at_least=0.75),
        judged(
            "BN+ACT+CONV, CUDA, in-place II",
            "below 1.00 on every CONV shape",
            _ratios(blocks),
            below=1,
            text="{:.3f}",
            paper="1.008–1.02",
        ),
        _time_saved(blocks, cuda),
        judged(f"{cpu}, NCHW", "0.8", _ratios(nchw), at_most=0.8),
        judged(f"{cpu}, channels_last above 4 MiB", "0.9", _ratios(c for c in nhwc if _mib(c) > 4), at_most=0.9),
        judged(f"{cpu}, channels_last up to 4 MiB", "1.1", _ratios(c for c in nhwc if _mib(c) <= 4), at_most=1.1),
        judged(f"{eager}, NCHW", "1.3", _ratios(nchw, EAGER), at_most=1.3),
        judged(f"{eager}, channels_last", "1.8", _ratios(nhwc, EAGER), at_most=1.8),
        judged(f"BN+ACT, CUDA, {against_package}", "0.6", _package_ratios(packages, "cuda"), at_most=0.6, paper="1"),
        judged(f"BN+ACT, CPU, {against_package}", "0.25", _package_ratios(packages, "cpu"), at_most=0.25, paper="1"),
        judged("host time of BN+ACT, in-place II, forward and backward", "1.5", _ratios(chosen("host")), at_most=1.5),
        judged("host time of BN+ACT, in-place II, inference", "1.5", _ratios(chosen("host_eval")), at_most=1.5),
        _network([c for c in cells if c[STANDARD]["group"] == "network" and c[STANDARD]["device"] == "cpu"]),
    ]


def _name(cell: Rows) -> str:
    return " ".join(cell[STANDARD][part] for part in ("shape", "layout", "dtype"))


def _mib(cell: Rows) -> float:
    return cell[STANDARD]["input_bytes"] / MIB


def _is_slow(cell: Rows) -> bool:
    return cell[STANDARD]["median_ms"] > 0.1


def _ratios(cells: Iterable[Rows], ours: str = INPLACE_2) -> dict[str, float]:
    """Time relative to standard, by cell name."""
    return {_name(cell): time_ratio(cell, ours, STANDARD).median for cell in cells if ours in cell}


def _package_ratios(cells: list[Rows], device: str) -> dict[str, float]:
    """Ratios to the package, without the time to copy x: after a convolution the package would need no copy."""
    ratios = {}
    for cell in cells:
        if cell[STANDARD]["device"] == device:
            pairs = zip(cell[PACKAGE]["times_ms"], cell[COPY]["times_ms"], strict=True)
            package_ms = [max(package - copy, 1e-6) for package, copy in pairs]
            ratios[_name(cell)] = ratio_of(cell[INPLACE_2]["times_ms"], package_ms).median
    return ratios


def _time_saved(blocks: list[Rows], alone: list[Rows]) -> Target:
    """Time saved in the block with a convolution, as a share of standard BN + ACT alone on the same shape."""
    standard_ms = {_name(cell): cell[STANDARD]["median_ms"] for cell in alone if _is_slow(cell)}
    saved = {}
    for cell in blocks:
        if (name := _name(cell)) in standard_ms:
            pairs = zip(cell[STANDARD]["times_ms"], cell[INPLACE_2]["times_ms"], strict=True)
            saved[name] = statistics.median(standard - ours for standard, ours in pairs) / standard_ms[name]
    to_reach = "0.30 of the BN+ACT time saved where that exceeds 100 µs"
    return judged("BN+ACT+CONV, CUDA, in-place II", to_reach, saved, at_least=0.3)


def _saved(cells: list[Rows]) -> Target:
    target = Target("saved bytes, BN+ACT+CONV, in-place II", "0.5 plus O(C), exactly", paper="0.5")
    if not cells:
        return target
    ours, standard = ([_activation_bytes(cell[name]) for cell in cells] for name in (INPLACE_2, STANDARD))
    exact = [2 * own == other for own, other in zip(ours, standard, strict=True)]
    most = max(own / other for own, other in zip(ours, standard, strict=True))
    vectors = max(cell[INPLACE_2]["saved_vector_bytes"] / (4 * cell[INPLACE_2]["size"][1]) for cell in cells)
    measured = f"{most:.4g} plus {vectors:.3g} C floats, {sum(exact)} of {len(cells)}"
    return target._replace(measured=measured, verdict=PASS if all(exact) else MISS)


def _activation_bytes(row: dict) -> int:
    return row["saved_bytes"] - row["saved_vector_bytes"]


def _order(cells: list[Rows]) -> Target:
    """Overheads over standard, medians over cells, by the strategies' letters in Figure 2."""
    target = Target(
        "overhead over standard, BN+ACT+CONV: in-place II (e), I (d), checkpointing (c), (b)",
        "as measured",
        paper="e ≤ d ≤ c ≤ b, b's almost twice d's",
    )
    letters = {"e": INPLACE_2, "d": INPLACE_1, "c": CHECKPOINTING_C, "b": CHECKPOINTING_B}
    complete = [cell for cell in cells if all(name in cell for name in letters.values())]
    if not complete:
        return target
    medians = {letter: statistics.median(_ratios(complete, name).values()) for letter, name in letters.items()}
    measured = ", ".join(f"{letter} {100 * (median - 1):+.1f} %" for letter, median in medians.items())
    return target._replace(measured=measured, verdict=SHOWN)


def _network(cells: list[Rows]) -> Target:
    target = Target(
        "small whole network, CPU, in-place II compiled against standard compiled",
        "0.9, at half the saved bytes (at most 0.55: pooling indices and the like are not halved)",
    )
    cells = [cell for cell in cells if COMPILED in cell and INPLACE_COMPILED in cell]
    if not cells:
        return target
    ratio = time_ratio(cells[0], INPLACE_COMPILED, COMPILED).median
    share = cells[0][INPLACE_COMPILED]["saved_bytes"] / cells[0][COMPILED]["saved_bytes"]
    verdict = PASS if ratio <= 0.9 and share <= 0.55 else MISS
    return target._replace(measured=f"{ratio:.2f} at {share:.3f} of the saved bytes", verdict=verdict)


TITLES = {
    "bn_act": "BN + ACT",
    "bn_act_conv": "BN + ACT + CONV",
    "network": "Small whole network",
    "host": "Host time of BN + ACT",
    "host_eval": "Host time of BN + ACT, inference",
}

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


def page(result: dict, name: str) -> str:
    rows = result["rows"]
    sections = [
        frame.target_table(targets(rows, result["left_out"])),
        "A target counts as reached if every shape, layout and dtype that it covers reaches it.",
    ]
    if _shapes(rows):
        about = "Time relative to standard, median over CONV1 to CONV4, and activation-sized buffers kept:"
        picture = f"![time of a forward and backward pass of BN + ACT + CONV for each strategy]({name}.png)"
        sections.append(section("Summary", about, summary(rows), picture))
    for title, cells in by_kind(by_cell(rows)).items():
        sections.append(section(title, columns((row for cell in cells for row in cell.values()), COLUMNS, left=3)))
    sections += _left_out(result["left_out"])
    return frame.page_text(
        "abn",
        result,
        device=frame.DEVICES[result["arguments"]["device"]],
        sections=sections,
        passes_of_a_copy=PASSES_OF_A_COPY,
        passes_over_memory=PASSES_OVER_MEMORY,
    )


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

    return table(["strategy", *kinds], ([name, *(entry(name, cells) for cells in kinds.values())] for name in COLOURS))


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
    ("to standard", _ratio),
    ("saved MiB", lambda row: mib(row["saved_bytes"], 2)),
    ("to standard", _saved_to_standard),
    ("buffers", _buffers),
    ("peak MiB", lambda row: mib(row["peak_bytes"], 2)),
]


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
