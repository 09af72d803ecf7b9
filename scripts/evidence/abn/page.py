"""The page and the chart of `abn`, made from its record alone."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.evidence.abn.strategies import (
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
from scripts.evidence.frame import MIB, MISS, PASS, Ratio, Target, judged, page_text, ratio_of, table, target_table

SHOWN, PASS_IN_PART = "shown", "reached where measured"

# Forward: read x for the statistics, read x, write z. Backward: read z and dz for the sums, read both, write dx.
PASSES_OVER_MEMORY = 8
PASSES_OF_A_COPY = 2

Rows = dict[str, dict]  # of one cell, by strategy
EAGER = f"{INPLACE_2}, eager backend"


def by_cell(rows: list[dict]) -> list[Rows]:
    cells: dict[tuple, Rows] = {}
    for row in rows:
        key = tuple(row[part] for part in ("group", "shape", "layout", "dtype"))
        cells.setdefault(key, {})[row["strategy"]] = row
    return list(cells.values())


def targets(rows: list[dict], left_out: list[dict]) -> list[Target]:
    """All targets. If in-place II is missing in a cell, a target is at most reached where measured."""
    missing = any(entry["strategy"] in ("all", STANDARD, INPLACE_2) for entry in left_out)
    return [
        target._replace(verdict=PASS_IN_PART) if missing and target.verdict == PASS else target
        for target in _targets([cell for cell in by_cell(rows) if STANDARD in cell])
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
    bandwidth = {_name(c): share / _ratio(c, INPLACE_2, COPY) for c in cuda if _mib(c) > 256}
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


def _ratio(cell: Rows, ours: str, other: str) -> float:
    return ratio_of(cell[ours]["times_ms"], cell[other]["times_ms"]).median


def _ratios(cells: Iterable[Rows], ours: str = INPLACE_2) -> dict[str, float]:
    """Time relative to standard, by cell name."""
    return {_name(cell): _ratio(cell, ours, STANDARD) for cell in cells if ours in cell}


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
    ratio = _ratio(cells[0], INPLACE_COMPILED, COMPILED)
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

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    STANDARD: "#000000",
    COMPILED: "#999999",
    BUDGET: "#F0E442",
    CHECKPOINTING_B: "#D55E00",
    CHECKPOINTING_C: "#E69F00",
    INPLACE_1: "#56B4E9",
    INPLACE_2: "#0072B2",
    PACKAGE: "#CC79A7",
}

METHOD = f"""
- CONV1 to CONV4 are the inputs of the first norm of an identity block in the four modules of ResNeXt-101: the module's
  own channels (256 to 2048) on feature maps of 56x56 to 7x7. CONV is the 1x1 convolution after it, to half the
  channels. The paper does not say which of a module's convolutions it timed. LARGE is one more tensor, for BN + ACT.
- A step is a forward pass and the gradients of input, scale, shift and convolution weight. One time is the mean over
  repeats back to back, with warm caches. Compilation and warm-up are not timed. Ratios are to *standard*.
- *Standard* is `F.batch_norm` and an in-place leaky ReLU (slope 0.01). cuDNN may benchmark its algorithms and use tf32
  for all convolutions. *Compiled* is `torch.compile(fullgraph=True)` with static shapes around the whole block; its
  activation is not in place, because an in-place one compiles to far slower code. *Budget 0.5* compiles with
  `activation_memory_budget=0.5`. *Sync, alone* is `sync=True` in a process group of one, which exchanges nothing. The
  column *backend* says what computes our layers; by default `backend=auto` chooses.
- *Host time* is that of a layer on 2x64x4x4 values, where Python and the dispatch of operators take nearly all of it;
  *standard* is `nn.BatchNorm2d` and `nn.LeakyReLU` there, and *one layer* our `ABN`. *Inference* is a forward pass in
  eval mode under `no_grad`.
- On the CPU, freed memory is kept for the next allocation, as CUDA's caching allocator does (`engine.memory`). With
  glibc's defaults, a large buffer may or may not be taken from the system page by page, at several times the cost of
  computing its values.
- *Saved* counts the bytes that autograd keeps for the backward pass, each storage once, without parameters (and without
  a network's images); the input counts if a strategy keeps it. *Buffers* is the same in sizes of the input, without
  vectors of one value per channel. *Peak* is the most bytes allocated during a step whose input nothing else holds, so
  a strategy that does not need the input frees it.
- *Released package* overwrites its input, so here it is given a copy, and its time includes the copy. After a
  convolution it would need none, so the target against it subtracts the time of *copy* in the same round.
- Copy bandwidth counts {PASSES_OF_A_COPY} passes over the tensor, BN + ACT {PASSES_OVER_MEMORY}: forward reads x twice
  and writes z; backward reads z and dz twice and writes dx.
"""


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw its chart to `picture` unless only host time was measured."""
    if _shapes(result["rows"]):
        chart(result["rows"]).savefig(picture, dpi=110)
    return markdown(result, picture.name)


def markdown(result: dict, picture: str) -> str:
    arguments, rows = result["arguments"], result["rows"]
    device = {"cpu": "CPU", "cuda": "CUDA"}[arguments["device"]]
    overview = [
        *["", "## Summary", ""],
        *["Time relative to standard, median over CONV1 to CONV4, and activation-sized buffers kept:", ""],
        *summary(rows),
        *["", f"![time of a forward and backward pass of BN + ACT + CONV for each strategy]({picture})"],
    ]
    graphs = ["", "Times are of replayed CUDA graphs, without the time to launch kernels."]
    sections = [
        *(graphs if arguments["graphs"] else []),
        *target_table(targets(rows, result["left_out"])),
        *["", "A target counts as reached if every shape, layout and dtype that it covers reaches it."],
        *(overview if _shapes(rows) else []),
        *_tables(by_cell(rows)),
        *_left_out(result["left_out"]),
    ]
    title = f"BN + ACT (+ CONV) on {device}: time and memory of every strategy"
    return page_text(result, title, f"Batch {arguments['batch']}, {arguments['rounds']} rounds", sections, METHOD)


def _shapes(rows: list[dict]) -> list[Rows]:
    """The cells CONV1 … CONV4."""
    return [cell for cell in by_cell(rows) if cell[STANDARD]["shape"].startswith("CONV")]


def summary(rows: list[dict]) -> list[str]:
    """Every strategy's time to standard, median over CONV1 … CONV4, and the buffers it keeps."""
    columns: dict[tuple[str, str, str], list[Rows]] = {}
    for cell in _shapes(rows):
        standard = cell[STANDARD]
        columns.setdefault((standard["group"], standard["layout"], standard["dtype"]), []).append(cell)

    def entry(name: str, cells: list[Rows]) -> str:
        found = [cell for cell in cells if name in cell]
        if not found:
            return ""
        ratio = statistics.median(cell[name]["ratio"] for cell in found)
        return f"{ratio:.2f}, {round(found[0][name]['saved_buffers'])} kept"

    titles = [f"{TITLES[group]}, {layout}, {dtype}" for group, layout, dtype in columns]
    lines = [[name, *(entry(name, cells) for cells in columns.values())] for name in COLOURS]
    return table(["strategy", *titles], lines)


def _tables(cells: list[Rows]) -> Iterator[str]:
    """A table for each group, layout and dtype."""
    groups: dict[str, list[Rows]] = {}
    for cell in cells:
        standard = cell[STANDARD]
        heading = f"## {TITLES[standard['group']]}, {standard['layout']}, {standard['dtype']}"
        groups.setdefault(heading, []).append(cell)
    titles = ["shape", "strategy", "backend", "ms", "to standard", "saved MiB", "to standard", "buffers", "peak MiB"]
    for heading, chosen in groups.items():
        yield from ("", heading, "")
        yield from table(titles, [_line(cell, name) for cell in chosen for name in cell], left=3)


def _line(cell: Rows, name: str) -> list[str]:
    row, standard = cell[name], cell[STANDARD]
    shape = f"{row['shape']} {'x'.join(map(str, row['size']))}" if name == STANDARD else ""
    ratio = "1" if name == STANDARD else f"{Ratio(row['ratio'], *row['ratio_quartiles']):.2f}"
    known = [shape, name, row["backend"] or "", f"{row['median_ms']:.3f}", ratio]
    if row["saved_bytes"] is None:
        return [*known, "", "", "", ""]
    share = f"{row['saved_bytes'] / standard['saved_bytes']:.3f}"
    buffers = "" if row["group"] == "network" else f"{row['saved_buffers']:g}"
    return [*known, f"{row['saved_bytes'] / MIB:.2f}", share, buffers, f"{row['peak_bytes'] / MIB:.2f}"]


def _left_out(entries: list[dict]) -> Iterator[str]:
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        cells.setdefault((entry["strategy"], entry["reason"]), []).append(entry["cell"])
    if cells:
        yield from ("", "## Not measured", "")
    for (strategy, reason), names in cells.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cells, {names[0]} to {names[-1]}"
        yield f"- {strategy} ({where}): {reason}"


def chart(rows: list[dict]) -> Figure:
    """Figure 4: a panel for each layout and dtype, bars for each shape, labelled with the ratio to standard."""
    cells = by_cell(rows)
    if not cells:
        return Figure()
    groups = {cell[STANDARD]["group"] for cell in cells}
    group = "bn_act_conv" if "bn_act_conv" in groups else cells[0][STANDARD]["group"]
    panels: dict[str, list[Rows]] = {}
    for cell in cells:
        if cell[STANDARD]["group"] == group:
            panels.setdefault(f"{cell[STANDARD]['layout']}, {cell[STANDARD]['dtype']}", []).append(cell)
    figure = Figure(figsize=(12, 0.8 + 3.4 * len(panels)), layout="constrained")
    handles: dict[str, Artist] = {}
    for axes, (name, chosen) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
        _bars(axes, chosen)
        axes.set(title=f"{TITLES[group]}, {name}", ylabel="forward + backward, ms")
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _bars(axes: Axes, cells: list[Rows]) -> None:
    names = [name for name in COLOURS if any(name in cell for cell in cells)]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [place for place, cell in enumerate(cells) if name in cell]
        heights = [cells[place][name]["median_ms"] for place in places]
        left = [place + (i - (len(names) - 1) / 2) * width for place in places]
        bars = axes.bar(left, heights, 0.92 * width, color=COLOURS[name], label=name)
        ratios = ["" if name == STANDARD else f"{cells[place][name]['ratio']:.2f}" for place in places]
        axes.bar_label(bars, ratios, rotation=90, padding=3, fontsize=8)
    labels = [f"{c[STANDARD]['shape']}\n{'x'.join(map(str, c[STANDARD]['size']))}" for c in cells]
    axes.set_xticks(range(len(cells)), labels)
    axes.margins(x=0.01, y=0.18)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
