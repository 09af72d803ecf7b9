"""The page and the chart of a record; both are made from the JSON file alone."""

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.records import opening, target_lines

from .strategies import BUDGET, CHECKPOINTING_B, CHECKPOINTING_C, COMPILED, INPLACE_1, INPLACE_2, PACKAGE, STANDARD
from .targets import MIB, PASSES_OF_A_COPY, PASSES_OVER_MEMORY, Rows, by_cell, verdicts

TITLES = {
    "bn_act": "BN + ACT",
    "bn_act_conv": "BN + ACT + CONV",
    "network": "Small whole network",
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
- CONV1 to CONV4 are what the first norm of an identity block sees in the four modules of ResNeXt-101: the module's
  own channels (256 to 2048) on maps of 56 to 7 pixels a side; CONV is the 1x1 convolution to half the channels behind
  it. The paper does not say which of a module's convolutions it timed. LARGE is one more tensor, for BN + ACT alone.
- One step is a forward pass and the gradients of input, scale, shift and convolution weight. In each round every
  strategy is timed once, in a new random order; a time is the mean over repeats right after each other, without
  emptying caches in between. Times are medians over the rounds; ratios are medians of the ratios to *standard* within
  a round, with their quartiles. Compilation and warm-up are not timed.
- *Standard* is `F.batch_norm` and an in-place leaky ReLU (slope 0.01); cuDNN may benchmark its algorithms, and use
  tf32 for the convolutions of all strategies. *Compiled* is `torch.compile(fullgraph=True)` with static shapes around
  the whole block, the activation not in place (in place it takes the compiler far longer); *budget 0.5* compiles with
  `activation_memory_budget=0.5`. *Sync, alone* is `sync=True` in a process group of one, which exchanges
  nothing. The column *backend* says
  what computes a strategy of ours, by default what `backend=auto` chooses.
- On the CPU, freed memory is kept for the next allocation, as CUDA's caching allocator does (`engine.malloc`). With
  glibc's defaults every large buffer may be taken from the system page by page, for several times the cost of its
  values, or not, by chance.
- Saved: bytes that autograd keeps for the backward pass, each storage once, without parameters (and without a
  network's images); the input counts where a strategy keeps it. Buffers: how many times the input's bytes that is,
  vectors of one value per channel aside. Peak: the most bytes allocated during a step whose input nobody else holds,
  so that a strategy that does not need it frees it.
- *Released package* writes over its input and so is given a copy here, which its time includes; in networks it needs
  none, and the target against it subtracts the time of *copy* of the same round.
- Copy bandwidth counts {PASSES_OF_A_COPY} passes over the tensor, BN + ACT {PASSES_OVER_MEMORY}: x twice and z
  written forward; z and dz, z and dz again, and dx written backward.
"""


def page_of(result: dict, picture: Path) -> str:
    """The page, and the chart in it, which is written to `picture`."""
    chart(result["rows"]).savefig(picture, dpi=110)
    return markdown(result, picture.name)


def markdown(result: dict, picture: str) -> str:
    """The page."""
    arguments = result["arguments"]
    device = {"cpu": "CPU", "cuda": "CUDA"}[arguments["device"]]
    title = f"BN + ACT (+ CONV) on {device}: time and memory of every strategy"
    lines = opening(title, result, f"Batch {arguments['batch']}, {arguments['rounds']} rounds")
    if arguments["graphs"]:
        lines += ["", "Times are those of replayed CUDA graphs: the device's work, without the time to launch it."]
    lines += ["", *target_lines(verdicts(result["rows"], result["left_out"]), ("paper", "to reach", "measured"))]
    lines += ["", "A target is reached when every shape, layout and dtype that it is about reaches it.", ""]
    lines += [
        "## Summary",
        "",
        "Time relative to standard, median over CONV1 to CONV4, and activation-sized buffers:",
        "",
    ]
    lines += [*summary(result["rows"]), ""]
    lines += [f"![time of a forward and backward pass of BN + ACT + CONV for each strategy]({picture})", ""]
    lines += ["## How it was measured", METHOD]
    lines += _tables(by_cell(result["rows"]))
    lines += _left_out(result["left_out"])
    return "\n".join(lines).rstrip() + "\n"


def summary(rows: list[dict]) -> list[str]:
    """A line for each strategy: its ratios to standard, medians over CONV1 … CONV4, and the buffers it keeps."""
    columns: dict[tuple[str, str, str], list[Rows]] = {}
    for cell in by_cell(rows):
        standard = cell[STANDARD]
        if standard["shape"].startswith("CONV"):
            columns.setdefault((standard["group"], standard["layout"], standard["dtype"]), []).append(cell)
    titles = [f"{TITLES[group]}, {layout}, {dtype}" for group, layout, dtype in columns]
    lines = ["| strategy | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(columns)]
    for name in COLOURS:
        line = [name]
        for cells in columns.values():
            found = [cell[name] for cell in cells if name in cell]
            ratio = statistics.median(row["ratio"] for row in found) if found else None
            line.append("" if ratio is None else f"{ratio:.2f}, {round(found[0]['saved_buffers'])} kept")
        lines.append("| " + " | ".join(line) + " |")
    return lines


def _tables(cells: list[Rows]) -> list[str]:
    """A table for each group, layout and dtype."""
    lines, heading = [], None
    for cell in cells:
        standard = cell[STANDARD]
        of_cell = f"## {TITLES[standard['group']]}, {standard['layout']}, {standard['dtype']}"
        if of_cell != heading:
            heading = of_cell
            lines += ["", heading, ""]
            lines += [
                "| shape | strategy | backend | ms | to standard | saved MiB | to standard | buffers | peak MiB |"
            ]
            lines += ["|---|---|---|---:|---:|---:|---:|---:|---:|"]
        size = "x".join(map(str, standard["size"]))
        for row in cell.values():
            first = f"{row['shape']} {size}" if row is standard else ""
            lines.append("| " + " | ".join([first, *_cells_of(row, standard)]) + " |")
    return [*lines, ""]


def _cells_of(row: dict, standard: dict) -> list[str]:
    lower, upper = row["ratio_quartiles"]
    ratio = "1" if row is standard else f"{row['ratio']:.2f} ({lower:.2f} – {upper:.2f})"
    cells = [row["strategy"], row["backend"] or "", f"{row['median_ms']:.3f}", ratio]
    if row["saved_bytes"] is None:
        return [*cells, "", "", "", ""]
    share = row["saved_bytes"] / standard["saved_bytes"]
    buffers = "" if row["group"] == "network" else f"{row['saved_buffers']:g}"
    return [*cells, f"{row['saved_bytes'] / MIB:.2f}", f"{share:.3f}", buffers, f"{row['peak_bytes'] / MIB:.2f}"]


def _left_out(entries: list[dict]) -> list[str]:
    if not entries:
        return []
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        cells.setdefault((entry["strategy"], entry["reason"]), []).append(entry["cell"])
    lines = ["## Not measured", ""]
    for (strategy, reason), names in cells.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cells, {names[0]} to {names[-1]}"
        lines.append(f"- {strategy} ({where}): {reason}")
    return lines


def chart(rows: list[dict]) -> Figure:
    """Figure 4: a panel for each layout and dtype, bars for each shape, the ratio to standard on them."""
    cells = by_cell(rows)
    if not cells:
        return Figure()
    group = "bn_act_conv" if any(c[STANDARD]["group"] == "bn_act_conv" for c in cells) else cells[0][STANDARD]["group"]
    panels: dict[str, list[Rows]] = {}
    for cell in cells:
        if cell[STANDARD]["group"] == group:
            panels.setdefault(f"{cell[STANDARD]['layout']}, {cell[STANDARD]['dtype']}", []).append(cell)
    figure = Figure(figsize=(12, 0.8 + 3.4 * len(panels)), layout="constrained")
    every_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (name, chosen) in zip(every_axes, panels.items(), strict=True):
        _bars(axes, chosen)
        axes.set(title=f"{TITLES[group]}, {name}", ylabel="forward + backward, ms")
    handles = {
        label: handle for axes in every_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _bars(axes: Axes, cells: list[Rows]) -> None:
    names = [name for name in COLOURS if any(name in cell for cell in cells)]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [place for place, cell in enumerate(cells) if name in cell]
        chosen = [cells[place][name] for place in places]
        left = [place + (i - (len(names) - 1) / 2) * width for place in places]
        bars = axes.bar(left, [row["median_ms"] for row in chosen], 0.92 * width, color=COLOURS[name], label=name)
        ratios = ["" if name == STANDARD else f"{row['ratio']:.2f}" for row in chosen]
        axes.bar_label(bars, ratios, rotation=90, padding=3, fontsize=8)
    axes.set_xticks(
        range(len(cells)), [f"{c[STANDARD]['shape']}\n{'x'.join(map(str, c[STANDARD]['size']))}" for c in cells]
    )
    axes.margins(x=0.01, y=0.18)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
