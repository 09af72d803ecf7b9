"""Measure memory and time of reversible networks, beside stored activations and checkpointing:

    python -m scripts.evidence.reversible out=FILE.json
    python -m scripts.evidence.reversible rounds=3 images=50 out=FILE.json
    python -m scripts.evidence.reversible measure=false out=FILE.json

Bytes and operations are counted, times are measured. FILE.png is RevNet's Table 1, measured; FILE_budget.png shows
memory against time of every method.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from matplotlib.figure import Figure

from engine.memory import keep_freed_memory
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence import reversible_costs as costs
from scripts.evidence.frame import MIB, mib, ratio_of, time_ratio
from scripts.evidence.reversible_costs import FORWARD, PUBLISHED, VARIANTS
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns, section

PARTS = ("steps", "activations", "depths", "segmentation", "budget")


@dataclass
class ReversibleArguments(frame.DeviceArguments):
    threads: int = key(1, above=0)  # of PyTorch
    rounds: int = key(15, above=0)  # each measures every method once
    images: int = key(100, above=0)  # per step on CIFAR
    crop_size: int = key(128, above=0)  # pixels, of the segmentation step
    parts: list[str] = field(default_factory=lambda: list(PARTS))  # what is measured

    def check(self) -> None:
        super().check()
        frame.check_choices("parts", self.parts, PARTS)


def measure(arguments: ReversibleArguments, clock: frame.Clock) -> dict:
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    device, rounds = arguments.device, arguments.rounds
    parts: dict[str, Callable[[], list[dict]]] = {
        "activations": costs.activations,
        "depths": costs.depths,
        "segmentation": costs.segmentation,
        "segmentation_steps": partial(costs.segmentation_steps, device, arguments.crop_size, rounds),
        "steps": partial(costs.cifar_steps, device, arguments.images, rounds, clock),
        "budget": partial(costs.budget, device, arguments.images, rounds),
    }
    found: dict = {"environment": {"threads": arguments.threads}}
    for name, measured in parts.items():
        if name.partition("_")[0] in arguments.parts:  # "segmentation" has two
            found[name] = measured()
            clock.report(name)
    return found


def page(result: dict, name: str) -> str:
    sections = []
    if "steps" in result:
        cases = frame.grouped(result["steps"], ("norm", "layout", "precision"), "variant")
        sections.append(section("Time of a step", columns(cases.values(), STEPS)))
    if "activations" in result:
        title = "Activations kept of a step on 100 CIFAR images"
        sections.append(section(title, columns(result["activations"], ACTIVATIONS)))
    if "depths" in result:
        picture = f"![memory and operations over depth]({name}.png)"
        rows = _relative_to_naive(result["depths"])
        sections.append(section("RevNet's Table 1, measured", picture, columns(rows, DEPTHS, left=2)))
    if "segmentation" in result:
        rows = [{**row, "first": result["segmentation"][0]} for row in result["segmentation"]]
        steps = columns(result["segmentation_steps"], SEGMENTATION_STEPS)
        sections.append(section("Segmentation", columns(rows, SEGMENTATION), steps))
    if "budget" in result:
        picture = f"![memory against time]({name}_budget.png)"
        rows = sorted(_relative_to_standard(result["budget"]), key=lambda row: row["peak_bytes"])
        sections.append(section("Memory against time", picture, columns(rows, BUDGET)))
    return frame.page_text("reversible", result, sections=sections)


def _relative_to_naive(rows: list[dict]) -> list[dict]:
    naive = {row["units"]: row["flops"] for row in rows if row["method"] == "naive"}
    return [{**row, "to_naive": row["flops"] / naive[row["units"]]} for row in rows]


def _relative_to_standard(rows: list[dict]) -> list[dict]:
    (standard_ms,) = (row["times_ms"] for row in rows if row["method"] == "ResNet-110, std")
    return [{**row, "to_standard": ratio_of(row["times_ms"], standard_ms)} for row in rows]


STEPS: Columns = [
    ("RevNet-38", lambda rows: "{norm}, {layout}, {precision}".format_map(rows[FORWARD])),
    *((f"{name}, ms", lambda rows, name=name: f"{statistics.median(rows[name]['times_ms']):.0f}") for name in VARIANTS),
    ("once / stored", lambda rows: f"{time_ratio(rows, 'once', 'stored'):.2f}"),
    ("one more forward pass", lambda rows: f"{1 + time_ratio(rows, FORWARD, 'stored').median:.2f}"),
    ("twice / once", lambda rows: f"{time_ratio(rows, 'twice', 'once'):.2f}"),
]
ACTIVATIONS: Columns = [
    ("network", "{network}"),
    ("parameters", "{parameters:,}"),
    ("MemCNN's README, MB", lambda row: f"{PUBLISHED[row['network']]:.1f}"),
    ("std, MB", "{std:.1f}"),
    ("in-place, MB", "{inplace:.1f}"),
]
DEPTHS: Columns = [
    ("units", "{units}"),
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"], 2)),
    ("peak, MiB", lambda row: mib(row["peak_bytes"], 2)),
    ("operations / naive", "{to_naive:.2f}"),
]
SEGMENTATION: Columns = [
    ("with a DeepLabV3 head, output stride 8", "{case}"),
    ("bytes per pixel", "{bytes_per_pixel:,}"),
    ("less than ResNeXt-101, std", lambda row: f"{row['first']['bytes_per_pixel'] / row['bytes_per_pixel']:.1f}x"),
]
SEGMENTATION_STEPS: Columns = [
    ("RevNet-104", "{norm}"),
    ("stored, ms", lambda row: f"{statistics.median(row['stored']):.0f}"),
    ("once, ms", lambda row: f"{statistics.median(row['once']):.0f}"),
    ("once / stored", lambda row: f"{ratio_of(row['once'], row['stored']):.2f}"),
    ("angle, float32", "{angle_float32:.4f}"),
    ("angle, bfloat16", "{angle_bfloat16:.2f} (stored: {angle_bfloat16_stored:.2f})"),
]
BUDGET: Columns = [
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"])),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("time / standard", "{to_standard:.2f}"),
]
COLOURS = {"naive": "C7", "blocks": "C1", "sqrt": "C4", "recursive": "C2", "reversible": "C0"}


def pictures(result: dict) -> dict[str, Figure]:
    found = {}
    if "depths" in result:
        found[""] = depth_chart(_relative_to_naive(result["depths"]))
    if "budget" in result:
        found["_budget"] = budget_chart(_relative_to_standard(result["budget"]))
    return found


def depth_chart(rows: list[dict]) -> Figure:
    """Kept bytes, peak and operations of each method over the number of units."""
    figure, panels = charts.panels(1, 3, (12, 4))
    shown = [
        ("kept for the backward pass, MiB", "log", lambda row: row["kept_bytes"] / MIB),
        ("peak of a step, MiB", "log", lambda row: row["peak_bytes"] / MIB),
        ("operations, relative to naive", "linear", lambda row: row["to_naive"]),
    ]
    for axes, (title, scale, value) in zip(panels, shown, strict=True):
        lines = []
        for method, colour in COLOURS.items():
            own = [row for row in rows if row["method"] == method]
            lines.append(charts.Series(method, list(map(value, own)), [row["units"] for row in own], colour, "o-"))
        charts.lines(axes, lines, title=title, xlabel="units", yscale=scale)
        units = sorted({row["units"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(units, [str(count) for count in units])
    charts.legend(figure, columns=5)
    return figure


def budget_chart(rows: list[dict]) -> Figure:
    """Peak memory and time of a step of every method."""
    figure, (axes,) = charts.panels(1, 1, (8, 5))
    shown = []
    for row in rows:
        method = row["method"]
        colour = "C0" if "reversible" in method else "C3" if "compiled" in method else "C1"
        style = "s" if "inplace" in method else "o"
        x, y = [row["peak_bytes"] / MIB], [row["to_standard"].median]
        shown.append(charts.Series(method, y, x, colour, style, [method]))
    charts.points(
        axes, shown, xscale="log", xlabel="peak of a step, MiB", ylabel="time of a step, relative to ResNet-110, std"
    )
    least, most = axes.get_xlim()
    axes.set_xlim(least / 1.2, 2.5 * most)  # room for the names
    return figure


run, main = frame.benchmark("reversible", ReversibleArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
