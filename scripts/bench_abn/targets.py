"""The targets of the benchmark, each judged by the rows of a record.

A target is reached when every cell that it is about reaches it; ratios are medians of the ratios within each round.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from scripts.records import MISS, NOT_MEASURED, PASS

from .strategies import (
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

SHOWN, PASS_IN_PART = "shown", "reached where measured"
MIB = 2**20

# Forward: read x for the statistics, read x, write z. Backward: read z and dz for the sums, read both, write dx.
PASSES_OVER_MEMORY = 8
PASSES_OF_A_COPY = 2

Rows = dict[str, dict]  # of one cell, by strategy
EAGER = f"{INPLACE_2}, eager backend"


class Verdict(NamedTuple):
    about: str
    paper: str
    to_reach: str
    measured: str
    verdict: str


def by_cell(rows: list[dict]) -> list[Rows]:
    """The rows of each cell."""
    cells: dict[tuple, Rows] = {}
    for row in rows:
        key = tuple(row[part] for part in ("group", "shape", "layout", "dtype"))
        cells.setdefault(key, {})[row["strategy"]] = row
    return list(cells.values())


def paired(ours: dict, others: dict, less: dict | None = None) -> float:
    """Median over the rounds of our time in that of others, `less` what they do not need where they are used."""
    minus = less["times_ms"] if less else [0.0] * len(ours["times_ms"])
    triples = zip(ours["times_ms"], others["times_ms"], minus, strict=True)
    return statistics.median(own / max(other - copy, 1e-6) for own, other, copy in triples)


def verdicts(rows: list[dict], left_out: list[dict]) -> list[Verdict]:
    """The table of targets. Where in-place II is missing from a cell, nothing is more than reached where measured."""
    missing = any(entry["strategy"] in ("all", STANDARD, INPLACE_2) for entry in left_out)
    return [
        verdict._replace(verdict=PASS_IN_PART) if missing and verdict.verdict == PASS else verdict
        for verdict in _verdicts(rows)
    ]


def _verdicts(rows: list[dict]) -> list[Verdict]:
    cells = [c for c in by_cell(rows) if STANDARD in c and (INPLACE_2 in c or c[STANDARD]["group"] == "network")]

    def chosen(group: str, device: str | None = None, layout: str | None = None) -> list[Rows]:
        wanted = {"group": group, "device": device, "layout": layout}
        return [c for c in cells if all(v is None or c[STANDARD][key] == v for key, v in wanted.items())]

    nchw, nhwc = (chosen("bn_act", "cpu", layout) for layout in ("contiguous", "channels_last"))
    small, big = ([c for c in nhwc if _is_above(c, 4) == above] for above in (False, True))
    cuda, convs = chosen("bn_act", "cuda"), chosen("bn_act_conv", "cuda")
    alone, cpu = "BN+ACT, CUDA, in-place II", "BN+ACT, CPU, in-place II, `backend=auto`"
    eager = "BN+ACT, CPU, in-place II, eager backend"
    slow = [c for c in cuda if c[STANDARD]["median_ms"] > 0.1]
    return [
        _saved(chosen("bn_act_conv")),
        _order(chosen("bn_act_conv")),
        _at_most(0.70, slow, alone, "at most 0.70 where standard takes over 100 µs"),
        _bandwidth([c for c in cuda if _is_above(c, 256)]),
        _below_one(convs),
        _time_saved(convs, cuda),
        _at_most(0.8, nchw, f"{cpu}, NCHW", "0.8"),
        _at_most(0.9, big, f"{cpu}, channels_last above 4 MiB", "0.9"),
        _at_most(1.1, small, f"{cpu}, channels_last up to 4 MiB", "1.1"),
        _at_most(1.3, nchw, f"{eager}, NCHW", "1.3", EAGER),
        _at_most(1.8, nhwc, f"{eager}, channels_last", "1.8", EAGER),
        _against_package(0.6, cuda, "CUDA"),
        _against_package(0.25, chosen("bn_act", "cpu"), "CPU"),
        _network(chosen("network", "cpu")),
    ]


def _name(cell: Rows) -> str:
    return " ".join(cell[STANDARD][part] for part in ("shape", "layout", "dtype"))


def _is_above(cell: Rows, mib: float) -> bool:
    return cell[STANDARD]["input_bytes"] > mib * MIB


def _judged(
    about: str,
    paper: str,
    to_reach: str,
    values: list[tuple[float, str]],
    reached: Callable[[float], bool],
    worst: Callable[[Iterable], tuple[float, str]],
    digits: int = 2,
) -> Verdict:
    """A verdict over the (value, name) of several cells."""
    if not values:
        return Verdict(about, paper, to_reach, "–", NOT_MEASURED)
    numbers = [value for value, _ in values]
    extreme, name = worst(values)
    spread = f"{min(numbers):.{digits}f} – {max(numbers):.{digits}f}" if len(values) > 1 else f"{extreme:.{digits}f}"
    count = sum(reached(number) for number in numbers)
    measured = f"{spread} ({name})" if len(values) == 1 else f"{spread}, {count} of {len(values)}; worst {name}"
    return Verdict(about, paper, to_reach, measured, PASS if count == len(values) else MISS)


def _at_most(limit: float, cells: list[Rows], about: str, to_reach: str, ours: str = INPLACE_2) -> Verdict:
    values = [(paired(c[ours], c[STANDARD]), _name(c)) for c in cells if ours in c]
    return _judged(about, "–", to_reach, values, lambda ratio: ratio <= limit, max)


def _below_one(cells: list[Rows]) -> Verdict:
    values = [(paired(c[INPLACE_2], c[STANDARD]), _name(c)) for c in cells]
    about, to_reach = "BN+ACT+CONV, CUDA, in-place II", "below 1.00 on every CONV shape"
    return _judged(about, "1.008–1.02", to_reach, values, lambda ratio: ratio < 1, max, digits=3)


def _against_package(limit: float, cells: list[Rows], device: str) -> Verdict:
    """The package is given a copy of x to write over, which it does not need in a network: without that time."""
    values = [(paired(c[INPLACE_2], c[PACKAGE], c[COPY]), _name(c)) for c in cells if PACKAGE in c]
    about = f"BN+ACT, {device}, in-place II against the released package"
    return _judged(about, "1", f"{limit}", values, lambda ratio: ratio <= limit, max)


def _bandwidth(cells: list[Rows]) -> Verdict:
    share = PASSES_OVER_MEMORY / PASSES_OF_A_COPY
    values = [(share / paired(c[INPLACE_2], c[COPY]), _name(c)) for c in cells]
    about, to_reach = "BN+ACT, CUDA, in-place II, above 256 MiB", "0.75 of measured copy bandwidth"
    return _judged(about, "–", to_reach, values, lambda part: part >= 0.75, min)


def _time_saved(convs: list[Rows], alone: list[Rows]) -> Verdict:
    """What the block with a convolution saves, as a share of what standard BN + ACT of its shape takes."""
    values = []
    standard_ms = {_name(c): c[STANDARD]["median_ms"] for c in alone}
    for cell in convs:
        name = _name(cell)
        if standard_ms.get(name, 0) <= 0.1:
            continue
        pairs = zip(cell[STANDARD]["times_ms"], cell[INPLACE_2]["times_ms"], strict=True)
        values.append((statistics.median(a - b for a, b in pairs) / standard_ms[name], name))
    to_reach = "0.30 of the BN+ACT time saved where that exceeds 100 µs"
    return _judged("BN+ACT+CONV, CUDA, in-place II", "–", to_reach, values, lambda share: share >= 0.3, min)


def _saved(cells: list[Rows]) -> Verdict:
    about, to_reach = "saved bytes, BN+ACT+CONV, in-place II", "0.5 plus O(C), exactly"
    if not cells:
        return Verdict(about, "0.5", to_reach, "–", NOT_MEASURED)
    exact = [2 * _activation_bytes(c[INPLACE_2]) == _activation_bytes(c[STANDARD]) for c in cells]
    shares = [_activation_bytes(c[INPLACE_2]) / _activation_bytes(c[STANDARD]) for c in cells]
    vectors = max(c[INPLACE_2]["saved_vector_bytes"] / (4 * c[INPLACE_2]["size"][1]) for c in cells)
    measured = f"{max(shares):.4g} plus {vectors:.3g} C floats, {sum(exact)} of {len(cells)}"
    return Verdict(about, "0.5", to_reach, measured, PASS if all(exact) else MISS)


def _activation_bytes(row: dict) -> int:
    return row["saved_bytes"] - row["saved_vector_bytes"]


def _order(cells: list[Rows]) -> Verdict:
    """Overheads over standard, the median over cells; the strategies go by their letters in Figure 2."""
    about, paper, to_reach = (
        "overhead over standard, BN+ACT+CONV: in-place II (e), I (d), checkpointing (c), (b)",
        "e ≤ d ≤ c ≤ b, b's almost twice d's",
        "as measured",
    )
    letters = {"e": INPLACE_2, "d": INPLACE_1, "c": CHECKPOINTING_C, "b": CHECKPOINTING_B}
    complete = [c for c in cells if all(name in c for name in letters.values())]
    if not complete:
        return Verdict(about, paper, to_reach, "–", NOT_MEASURED)
    overheads = {
        letter: 100 * (statistics.median(paired(c[name], c[STANDARD]) for c in complete) - 1)
        for letter, name in letters.items()
    }
    measured = ", ".join(f"{letter} {overhead:+.1f} %" for letter, overhead in overheads.items())
    return Verdict(about, paper, to_reach, measured, SHOWN)


def _network(cells: list[Rows]) -> Verdict:
    about = "small whole network, CPU, in-place II compiled against standard compiled"
    to_reach = "0.9, at half the saved bytes (at most 0.55: pooling indices and the like are not halved)"
    cells = [c for c in cells if COMPILED in c and INPLACE_COMPILED in c]
    if not cells:
        return Verdict(about, "–", to_reach, "–", NOT_MEASURED)
    ours, standard = cells[0][INPLACE_COMPILED], cells[0][COMPILED]
    ratio, share = paired(ours, standard), ours["saved_bytes"] / standard["saved_bytes"]
    verdict = PASS if ratio <= 0.9 and share <= 0.55 else MISS
    return Verdict(about, "–", to_reach, f"{ratio:.2f} at {share:.3f} of the saved bytes", verdict)
