"""What reversible networks save and cost, beside stored activations and checkpointing:

    python -m scripts.bench_reversible out=FILE.json

Writes FILE.json, FILE.md (targets, tables), FILE.png (RevNet's Table 1, measured) and FILE_budget.png (memory against
time of every method). `measure=false` makes the page again from FILE.json. Bytes and operations are counted, times are
measured.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure

from engine.distributed import device_of
from engine.memory import keep_freed_memory
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.frame import MIB, Cells, columns, mib, ratio_of
from scripts.evidence.reversible_costs import (
    FORWARD,
    PUBLISHED,
    VARIANTS,
    activations,
    budget,
    cifar_steps,
    depths,
    segmentation,
    segmentation_steps,
)

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
    cells: Cells = {
        "method": lambda row: row["method"],
        "kept, MiB": lambda row: mib(row["kept_bytes"]),
        "peak, MiB": lambda row: mib(row["peak_bytes"]),
        "time to standard": lambda row: f"{ratio_of(row['times_ms'], base):.2f}",
    }
    yield from ("", "## Memory against time", "", f"![memory against time]({picture})", "")
    yield from columns(sorted(rows, key=lambda row: row["peak_bytes"]), cells)


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


PARTS = ("steps", "activations", "depths", "segmentation", "budget")

METHOD = """
- *Stored* keeps all activations. *Once* runs every residual function once more in the backward pass, to restore the
  input and for its gradient: 4N operations. *Twice* restores first and then runs again, as a wrapper around any
  invertible module must: 5N. All three are the same network with the same weights and images; a step is a forward and a
  backward pass. On a CPU freed memory stays in the process, as in every training of this project.
- *One more forward pass*: the time of stored and of its forward pass a second time, relative to stored. By operations
  a forward pass is a third of a step, which gives 1.33; by time it may be more.
- *Kept* is what the graph keeps for the backward pass, without parameters and images, under fake tensors. *Peak* is the
  most that a step's tensors take at any moment beyond weights and images, measured by PyTorch's profiler.
- Operations are counted by PyTorch's FlopCounterMode, relative to stored activations.
- The *angle* is between the gradients of all parameters and those of stored activations in float32, in degrees, at
  initial weights.
- RevNet's Table 1: *blocks* checkpoints every unit, *sqrt* as many as keep memory and recomputation in balance,
  *recursive* halves the chain again and again (Chen et al., 2016). All run the units of one RevNet.
- Memory against time: ResNet-110 and RevNet-110 have equally many parameters and published errors of 5.74 and 5.76 %.
  *blocks* and *sqrt* are `trainer.recompute`, and so was *selective*. Compiled steps are measured after compilation.
"""


@dataclass
class ReversibleArguments(frame.Arguments):
    """Arguments of the benchmark."""

    device: str = key("cpu", one_of=("cpu", "cuda"))
    threads: int = key(1, above=0)
    rounds: int = key(15, above=0)
    images: int = key(100, above=0)  # per step on CIFAR
    crop_size: int = key(128, above=0)  # pixels, of the segmentation step
    parts: list[str] = field(default_factory=lambda: list(PARTS))

    def check(self) -> None:
        """Raise ValueError for an impossible argument."""
        device_of(self.device)
        frame.check_choices("parts", self.parts, PARTS)


def measure(arguments: ReversibleArguments, clock: frame.Clock) -> dict:
    """Measure the chosen parts."""
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    found: dict = {"environment": {"threads": arguments.threads}}
    if "activations" in arguments.parts:
        found["activations"] = activations()
        clock.report("activations")
    if "depths" in arguments.parts:
        found["depths"] = depths()
        clock.report("depths")
    if "segmentation" in arguments.parts:
        found["segmentation"] = segmentation()
        found["segmentation_steps"] = segmentation_steps(arguments.device, arguments.crop_size, arguments.rounds)
        clock.report("segmentation")
    if "steps" in arguments.parts:
        found["steps"] = cifar_steps(arguments.device, arguments.images, arguments.rounds, clock)
    if "budget" in arguments.parts:
        found["budget"] = budget(arguments.device, arguments.images, arguments.rounds)
    return found


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw the chart of Table 1."""
    arguments = result["arguments"]
    sections = [*frame.target_table(targets(result)), *_steps(result), *_activations(result), *_depths(result, picture)]
    sections += _segmentation(result)
    if "depths" in result:
        chart(result["depths"]).savefig(picture, dpi=110)
    if "budget" in result:
        second = picture.with_name(f"{picture.stem}_budget.png")
        budget_chart(result["budget"]).savefig(second, dpi=110)
        sections += budget_section(result["budget"], second.name)
    about = f"{arguments['rounds']} rounds; RevNet-38 on {arguments['images']} images of 32x32"
    return frame.page_text(result, "Reversible networks: memory and time", about, sections, METHOD)


def targets(result: dict) -> list[frame.Target]:
    """The targets of what was measured."""
    found = []
    if steps := result.get("steps"):
        flops = {row["variant"]: row["flops"] for row in steps}
        found.append(
            frame.judged(
                "operations, once to stored", "at most 1.34", {"": flops["once"] / flops["stored"]}, at_most=1.34
            )
        )
        ratios = {case: _ratio(rows, "once", "stored").median for case, rows in _cases(steps).items()}
        found.append(frame.judged("time of a step, once to stored", "at most 1.35, better 1.25", ratios, at_most=1.35))
        ratios = {case: _ratio(rows, "twice", "once").median for case, rows in _cases(steps).items()}
        found.append(frame.judged("time of a step, twice to once", "at least 1.15", ratios, at_least=1.15))
    if rows := result.get("activations"):
        for norm, limits in PROTOTYPE.items():
            shares = {row["network"]: row[norm] / limits[row["network"]] for row in rows if row["network"] in limits}
            found.append(frame.judged(f"activations kept, {norm}, to a prototype's", "at most 1", shares, at_most=1))
    if rows := result.get("segmentation"):
        kept = {row["case"]: row["bytes_per_pixel"] for row in rows}
        base = kept["ResNeXt-101, std, stored"]
        for precision, least in (("float32", 8), ("bfloat16", 12)):
            share = {"": base / kept[f"RevNet-104, inplace, reversible, {precision}"]}
            about = f"bytes per pixel of ResNeXt-101, std, to RevNet-104 in place, {precision} branches"
            found.append(frame.judged(about, f"at least {least}", share, at_least=least, text="{:.1f}"))
        ratios = {
            row["norm"]: frame.ratio_of(row["once"], row["stored"]).median for row in result["segmentation_steps"]
        }
        found.append(frame.judged("time of a segmentation step, once to stored", "at most 1.45", ratios, at_most=1.45))
    return found


# Megabytes that a prototype kept of a step on 100 images.
PROTOTYPE = {
    "std": {"RevNet-38": 68.9, "RevNet-110": 70.1, "RevNet-164": 158.7},
    "inplace": {"RevNet-38": 52.9, "RevNet-110": 53.7, "RevNet-164": 132.5},
}


def _cases(steps: list[dict]) -> dict[str, dict[str, dict]]:
    cases: dict[str, dict[str, dict]] = {}
    for row in steps:
        cases.setdefault(f"{row['norm']}, {row['layout']}, {row['precision']}", {})[row["variant"]] = row
    return cases


def _ratio(rows: dict[str, dict], ours: str, others: str) -> frame.Ratio:
    return frame.ratio_of(rows[ours]["times_ms"], rows[others]["times_ms"])


def _steps(result: dict) -> Iterator[str]:
    if "steps" not in result:
        return
    titles = ["RevNet-38", *(f"{variant}, ms" for variant in VARIANTS)]
    titles += ["once to stored", "one more forward pass", "twice to once"]
    lines = []
    for case, rows in _cases(result["steps"]).items():
        medians = [f"{statistics.median(rows[variant]['times_ms']):.0f}" for variant in VARIANTS]
        limit = 1 + _ratio(rows, FORWARD, "stored").median
        ratios = [f"{_ratio(rows, 'once', 'stored'):.2f}", f"{limit:.2f}", f"{_ratio(rows, 'twice', 'once'):.2f}"]
        lines.append([case, *medians, *ratios])
    yield from ("", "## Time of a step", "", *frame.table(titles, lines))


def _activations(result: dict) -> Iterator[str]:
    if "activations" not in result:
        return
    cells: Cells = {
        "network": lambda row: row["network"],
        "parameters": lambda row: f"{row['parameters']:,}",
        "MemCNN's README, MB": lambda row: f"{PUBLISHED[row['network']]:.1f}",
        "std, MB": lambda row: f"{row['std']:.1f}",
        "in-place, MB": lambda row: f"{row['inplace']:.1f}",
    }
    yield from ("", "## Activations kept of a step on 100 CIFAR images", "", *columns(result["activations"], cells))


def _depths(result: dict, picture: Path) -> Iterator[str]:
    if "depths" not in result:
        return
    naive = {row["units"]: row["flops"] for row in result["depths"] if row["method"] == "naive"}
    cells: Cells = {
        "units": lambda row: str(row["units"]),
        "method": lambda row: row["method"],
        "kept, MiB": lambda row: mib(row["kept_bytes"], 2),
        "peak, MiB": lambda row: mib(row["peak_bytes"], 2),
        "operations to naive": lambda row: f"{row['flops'] / naive[row['units']]:.2f}",
    }
    yield from ("", "## RevNet's Table 1, measured", "", f"![memory and operations over depth]({picture.name})", "")
    yield from columns(result["depths"], cells, left=2)


def _segmentation(result: dict) -> Iterator[str]:
    if "segmentation" not in result:
        return
    base = result["segmentation"][0]["bytes_per_pixel"]
    kept: Cells = {
        "with a DeepLabV3 head, output stride 8": lambda row: row["case"],
        "bytes per pixel": lambda row: f"{row['bytes_per_pixel']:,}",
        "less than ResNeXt-101, std": lambda row: f"{base / row['bytes_per_pixel']:.1f}x",
    }
    yield from ("", "## Segmentation", "", *columns(result["segmentation"], kept))
    steps: Cells = {
        "RevNet-104": lambda row: row["norm"],
        "stored, ms": lambda row: f"{statistics.median(row['stored']):.0f}",
        "once, ms": lambda row: f"{statistics.median(row['once']):.0f}",
        "once to stored": lambda row: f"{ratio_of(row['once'], row['stored']):.2f}",
        "angle, float32": lambda row: f"{row['angle_float32']:.4f}",
        "angle, bfloat16": lambda row: f"{row['angle_bfloat16']:.2f} (stored: {row['angle_bfloat16_stored']:.2f})",
    }
    yield from ("", *columns(result["segmentation_steps"], steps))


run, main = frame.benchmark("bench_reversible", ReversibleArguments, measure, page)
