"""Measure memory and time of reversible networks, beside stored activations and checkpointing:

    python -m scripts.evidence.reversible out=FILE.json
    python -m scripts.evidence.reversible rounds=3 images=50 only=[steps,depths] out=FILE.json
    python -m scripts.evidence.reversible parts=[restored] root=DIR checkpoints=FOLDER out=FILE.json

Bytes and operations are counted, times are measured. FILE.png is RevNet's Table 1, measured; FILE_budget.png shows
memory against time of every method. "restored" measures RevNet's Figure 4: FOLDER holds copies of a RevNet run's
last.pt, made while it trained. At the weights of each, it records the angle between the gradients from restored and
from stored activations, on the minibatch that the run takes next.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from matplotlib.figure import Figure

from engine.schema.keys import key
from keepless.saved import kept_bytes
from models import bodies
from models.bodies import revnet38_cifar, revnet104
from scripts.evidence import revnets
from scripts.evidence.counted import Cells, segmentation_network
from scripts.evidence.revnets import NORMS, VARIANTS, angle, gradient_of, loss_of, step_of
from scripts.reports import charts, frame
from scripts.reports import markdown as md
from scripts.reports.markdown import MIB, Columns, Rows, mib, section
from scripts.reports.measuring import LAYOUTS, PRECISIONS, operations_of, peak_bytes, timed

PARTS = ("steps", "activations", "depths", "segmentation", "budget", "restored")
FORWARD = "stored, forward pass"
STANDARD = "ResNet-110, std"
DEPTHS = (4, 16, 64, 256)  # units
PUBLISHED = {  # MB, MemCNN's README
    "ResNet-32": 238.6,
    "ResNet-110": 810.7,
    "ResNet-164": 2452.8,
    "RevNet-38": 85.6,
    "RevNet-110": 85.7,
    "RevNet-164": 432.7,
}


@dataclass
class ReversibleArguments(frame.DeviceArguments):
    images: int = key(100, above=0)  # per step on CIFAR
    crop_size: int = key(128, above=0)  # pixels, of the segmentation step
    parts: list[str] = field(default_factory=lambda: list(PARTS[:-1]))  # what is measured
    root: str | None = None  # of "restored": the data of the run: CIFAR-10, in any form that data=cifar10 takes
    checkpoints: str | None = None  # of "restored": folder with copies of a run's last.pt

    def check(self) -> None:
        super().check()
        frame.check_choices("parts", self.parts, PARTS)


def items(arguments: ReversibleArguments) -> dict[str, tuple]:
    """{PART/…: (part, what of it)}"""
    of_parts: dict[str, list[tuple]] = {
        "steps": list(itertools.product(NORMS, LAYOUTS, PRECISIONS)),
        "activations": [(title,) for title in PUBLISHED],
        "depths": [(count,) for count in DEPTHS],
        "segmentation": [("bytes",), *(("steps", norm) for norm in NORMS)],
    }
    chosen = [(part, *what) for part in arguments.parts for what in of_parts.get(part, [()])]
    return {"/".join(map(str, item)): item for item in chosen}


def measure(arguments: ReversibleArguments, part: str, *what: str | int) -> Rows:
    measured: dict[str, Callable[..., Iterable[dict]]] = {
        "steps": cifar_steps,
        "activations": lambda _, title: [revnets.activations_of(title)],
        "depths": lambda _, count: revnets.chain_of(count),
        "segmentation": segmentation,
        "budget": budget,
        "restored": restored,
    }
    return [{"part": part, **row} for row in measured[part](arguments, *what)]


def restored(arguments: ReversibleArguments) -> Iterator[dict]:
    return revnets.restored_angles(arguments.root, arguments.checkpoints, arguments.device)


def cifar_steps(arguments: ReversibleArguments, norm: str, layout: str, precision: str) -> Iterator[dict]:
    """Steps of RevNet-38 in a norm, layout and precision."""
    torch.manual_seed(0)
    network = revnet38_cifar(NORMS[norm], classes=10)
    network.to(arguments.device, memory_format=LAYOUTS[layout])  # type: ignore[call-overload]  # torch's hints lack it
    images = torch.randn(arguments.images, 3, 32, 32, device=arguments.device).to(memory_format=LAYOUTS[layout])
    labels = torch.randint(10, (arguments.images,), device=arguments.device)
    networks = revnets.variants(network)
    steps: dict = {name: partial(step_of, networks[name], images, labels, precision) for name in VARIANTS}
    steps[FORWARD] = partial(loss_of, networks["stored"], images, labels, precision)
    times_ms = timed(steps, arguments.rounds, arguments.device)
    for name, step in steps.items():
        case = {"norm": norm, "layout": layout, "precision": precision, "variant": name}
        yield {**case, "times_ms": times_ms[name], "flops": operations_of(step)}


def segmentation(arguments: ReversibleArguments, what: str, norm: str = "") -> Iterator[dict]:
    """Bytes per input pixel kept by RevNet-104 with a DeepLabV3 head, beside ResNeXt-101; or its steps on two crops."""
    if what == "bytes":
        yield from (revnets.bytes_per_pixel("ResNeXt-101", bodies.resnext101, norm, "float32") for norm in NORMS)
        for norm, reversible, precision in itertools.product(NORMS, (False, True), PRECISIONS):
            build = partial(revnet104, keep_activations=not reversible)
            yield revnets.bytes_per_pixel("RevNet-104", build, norm, precision, reversible)
        return
    torch.manual_seed(0)
    once = segmentation_network(revnet104, NORMS[norm]).to(arguments.device)
    stored = segmentation_network(partial(revnet104, keep_activations=True), NORMS[norm]).to(arguments.device)
    stored.load_state_dict(once.state_dict())
    images = torch.randn(2, 3, arguments.crop_size, arguments.crop_size, device=arguments.device)
    labels = torch.randint(19, (2, *images.shape[2:]), device=arguments.device)
    exact = gradient_of(stored, images, labels, "float32")
    angles = {
        "angle_float32": angle(gradient_of(once, images, labels, "float32"), exact),
        "angle_bfloat16": angle(gradient_of(once, images, labels, "bfloat16"), exact),
        "angle_bfloat16_stored": angle(gradient_of(stored, images, labels, "bfloat16"), exact),
    }
    networks = {"stored": stored, "once": once}
    steps = {name: partial(step_of, network, images, labels, "float32") for name, network in networks.items()}
    times_ms = timed(steps, arguments.rounds, arguments.device)
    yield from ({"norm": norm, "variant": name, "times_ms": own, **angles} for name, own in times_ms.items())


def budget(arguments: ReversibleArguments) -> list[dict]:
    """Steps of ResNet-110 and RevNet-110 on CIFAR images in float32: time, bytes kept, peak."""
    pixels = torch.randn(arguments.images, 3, 32, 32, device=arguments.device)
    labels = torch.randint(10, (arguments.images,), device=arguments.device)
    steps, rows = {}, []
    for title, (network, run) in revnets.candidates(arguments.device).items():
        loss = partial(loss_of, run, pixels, labels, "float32")
        kept = None if run is not network else kept_bytes(network, loss, [pixels])
        steps[title] = partial(step_of, network, pixels, labels, "float32", run)
        steps[title]()  # gradients exist; compiles
        rows.append(
            {"method": title, "kept_bytes": kept, "peak_bytes": peak_bytes(steps[title], arguments.device, network)}
        )
    times_ms = timed(steps, arguments.rounds, arguments.device)
    return [{**row, "times_ms": times_ms[str(row["method"])]} for row in rows]


def about(arguments: dict) -> tuple[str, str]:
    if arguments["parts"] == ["restored"]:
        return "Restored activations in a training to its end", "RevNet-38 in RevNet's full recipe"
    title = f"Memory and time, on {frame.DEVICES[arguments['device']]}"
    return title, f"{arguments['rounds']} rounds; RevNet-38 on {arguments['images']} images of 32x32"


def rows_of(call: dict, part: str) -> Rows:
    return [row for row in frame.rows_of(call) if row["part"] == part]


def sections(call: dict, picture: str) -> Iterator[str]:
    of_parts = {part: rows_of(call, part) for part in PARTS}
    if rows := of_parts["steps"]:
        cases = md.grouped(rows, ("norm", "layout", "precision"), "variant")
        yield section("Time of a step", md.columns(cases.values(), STEPS))
    if rows := of_parts["activations"]:
        yield section("Activations kept of a step on 100 CIFAR images", md.columns(rows, ACTIVATIONS))
    if rows := of_parts["depths"]:
        drawn, table = (
            f"![memory and operations over depth]({picture}.png)",
            md.columns(beside_naive(rows), DEPTH, left=2),
        )
        yield section("RevNet's Table 1, measured", drawn, table)
    if rows := of_parts["segmentation"]:
        kept = [{**row, "first": rows[0]} for row in rows if "case" in row]
        norms = md.grouped((row for row in rows if "norm" in row), ["norm"], "variant").values()
        yield section("Segmentation", md.columns(kept, SEGMENTATION), md.columns(norms, SEGMENTATION_STEPS))
    if rows := of_parts["budget"]:
        ordered = sorted(beside_standard(rows), key=lambda row: row["peak_bytes"])
        yield section(
            "Memory against time", f"![memory against time]({picture}_budget.png)", md.columns(ordered, BUDGET)
        )
    if rows := of_parts["restored"]:
        curves = [{"precision": precision} | own for precision, own in curves_of(rows).items()]
        run, steps = rows[0]["run"], len({row["step"] for row in rows})
        training = f"{run['steps']:,} in {run['precision']} (compile={run['compile']})"
        yield f"RevNet with {run['units']} units and norm={run['norm']}, at {steps} steps of a training of {training}."
        yield md.columns(curves, RESTORED)
        yield f"![angle and drift over steps]({picture}_restored.png)"


def beside_naive(rows: Rows) -> Rows:
    return [row for group in md.grouped(rows, ["units"], "method").values() for row in group.values()]


def beside_standard(rows: Rows) -> Rows:
    return [row for group in md.grouped(rows, ["part"], "method").values() for row in group.values()]


def curves_of(rows: Rows) -> dict[str, dict[str, list]]:
    """{precision: {name of a quantity: its values over steps}}"""
    curves: dict[str, dict[str, list]] = {}
    for row in rows:
        for name in ("step", *row.keys() & {"angle", "angle_to_float32", "drift"}):
            curves.setdefault(row["precision"], {}).setdefault(name, []).append(row[name])
    return curves


def _once(rows: dict[str, dict]) -> str:
    return f"{md.time_ratio(rows, 'once', 'stored'):.2f}"


STEPS: Columns = [
    ("RevNet-38", lambda rows: "{norm}, {layout}, {precision}".format_map(rows[FORWARD])),
    *((f"{name}, ms", lambda rows, name=name: f"{md.median_ms(rows[name]):.0f}") for name in VARIANTS),
    ("once / stored", _once),
    ("one more forward pass", lambda rows: f"{1 + md.time_ratio(rows, FORWARD, 'stored').median:.2f}"),
    ("twice / once", lambda rows: f"{md.time_ratio(rows, 'twice', 'once'):.2f}"),
]
ACTIVATIONS: Columns = [
    ("network", "{network}"),
    ("parameters", "{parameters:,}"),
    ("MemCNN's README, MB", lambda row: f"{PUBLISHED[row['network']]:.1f}"),
    ("std, MB", "{std:.1f}"),
    ("in-place, MB", "{inplace:.1f}"),
]
DEPTH: Columns = [
    ("units", "{units}"),
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"], 2)),
    ("peak, MiB", lambda row: mib(row["peak_bytes"], 2)),
    ("operations / naive", lambda row: f"{row['flops'] / row['beside']['naive']['flops']:.2f}"),
]
SEGMENTATION: Columns = [
    ("with a DeepLabV3 head, output stride 8", "{case}"),
    ("bytes per pixel", "{bytes_per_pixel:,}"),
    ("less than ResNeXt-101, std", lambda row: f"{row['first']['bytes_per_pixel'] / row['bytes_per_pixel']:.1f}x"),
]
SEGMENTATION_STEPS: Columns = [
    ("RevNet-104", lambda rows: rows["once"]["norm"]),
    *((f"{name}, ms", lambda rows, name=name: f"{md.median_ms(rows[name]):.0f}") for name in ("stored", "once")),
    ("once / stored", _once),
    ("angle, float32", lambda rows: "{angle_float32:.4f}".format_map(rows["once"])),
    (
        "angle, bfloat16",
        lambda rows: "{angle_bfloat16:.2f} (stored: {angle_bfloat16_stored:.2f})".format_map(rows["once"]),
    ),
]
BUDGET: Columns = [
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"])),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("time / standard", lambda row: f"{md.time_ratio(row['beside'], row['method'], STANDARD):.2f}"),
]
RESTORED: Columns = [
    ("", "{precision}"),
    ("largest angle", lambda found: f"{max(found['angle']):.2g}°"),
    ("median angle", lambda found: f"{statistics.median(found['angle']):.2g}°"),
    ("largest drift", lambda found: f"{max(found['drift']):.1g}"),
]
IN_BUDGETS = {  # the methods in each row of the table in docs/memory.md
    "all of it": ["ResNet-110, std, compiled, budget 1"],
    "half": ["ResNet-110, inplace", "ResNet-110, std, compiled, budget 0.5"],
    "a quarter": ["ResNet-110, inplace, blocks"],
    "a sixth": ["ResNet-110, inplace, sqrt"],
    "a tenth, or any depth": ["RevNet-110, inplace, reversible"],
}


def budgets_cells(record: dict) -> Cells:
    """Peak of a step and time to standard norms, of the methods of each row."""
    rows = {row["method"]: row for row in beside_standard(rows_of(record["calls"][0], "budget"))}
    cells: Cells = {}
    for name, methods in IN_BUDGETS.items():
        times = (md.time_ratio(rows, method, STANDARD).median for method in methods)
        peaks = (mib(rows[method]["peak_bytes"], 0) for method in methods)
        cells[name] = [None, "; ".join(peaks), "; ".join(f"{time:.2f}" for time in times)]
    return cells


def standard_peak_text(record: dict) -> str:
    (row,) = (row for row in rows_of(record["calls"][0], "budget") if row["method"] == STANDARD)
    return mib(row["peak_bytes"], 0)


COLOURS = {"naive": "C7", "blocks": "C1", "sqrt": "C4", "recursive": "C2", "reversible": "C0"}
SMALLEST = 1e-5  # degrees
PANELS = {  # {title: {quantity: (label, style)}}; stored activations alone are dotted
    "angle between two gradients, degrees": {
        "angle": ("restored and stored, {}", "-"),
        "angle_to_float32": ("stored, {} and float32", ":"),
    },
    "drift: error of restored inputs, relative": {"drift": ("{}", "-")},
}


def pictures(call: dict) -> dict[str, Figure]:
    drawn = {"": ("depths", depth_chart), "_budget": ("budget", budget_chart), "_restored": ("restored", angle_chart)}
    return {end: draw(rows) for end, (part, draw) in drawn.items() if (rows := rows_of(call, part))}


def depth_chart(rows: Rows) -> Figure:
    """Kept bytes, peak and operations of each method over the number of units."""
    figure, panels = charts.panels(1, 3, (12, 4))
    shown = [
        ("kept for the backward pass, MiB", "log", lambda row: row["kept_bytes"] / MIB),
        ("peak of a step, MiB", "log", lambda row: row["peak_bytes"] / MIB),
        ("operations, relative to naive", "linear", lambda row: row["flops"] / row["beside"]["naive"]["flops"]),
    ]
    units = sorted({row["units"] for row in rows})
    for axes, (title, scale, value) in zip(panels, shown, strict=True):
        lines = []
        for method, colour in COLOURS.items():
            own = [row for row in beside_naive(rows) if row["method"] == method]
            lines.append(charts.Series(method, list(map(value, own)), [row["units"] for row in own], colour, "o-"))
        charts.lines(axes, lines, title=title, xlabel="units", yscale=scale)
        axes.set_xscale("log", base=2)
        axes.set_xticks(units, [str(count) for count in units])
    charts.legend(figure, columns=5)
    return figure


def budget_chart(rows: Rows) -> Figure:
    """Peak memory and time of a step of every method."""
    figure, (axes,) = charts.panels(1, 1, (8, 5))
    shown = []
    for row in beside_standard(rows):
        method = row["method"]
        colour = "C0" if "reversible" in method else "C3" if "compiled" in method else "C1"
        style = "s" if "inplace" in method else "o"
        x, y = [row["peak_bytes"] / MIB], [md.time_ratio(row["beside"], method, STANDARD).median]
        shown.append(charts.Series(method, y, x, colour, style, [method]))
    charts.points(
        axes, shown, xscale="log", xlabel="peak of a step, MiB", ylabel=f"time of a step, relative to {STANDARD}"
    )
    least, most = axes.get_xlim()
    axes.set_xlim(least / 1.2, 2.5 * most)  # room for the names
    return figure


def angle_chart(rows: Rows) -> Figure:
    """The angle of the gradients and the drift over the steps of a training."""
    figure, panels = charts.panels(1, len(PANELS), (13 / 3 * len(PANELS), 4))
    for axes, (title, quantities) in zip(panels, PANELS.items(), strict=True):
        shown = [
            charts.Series(label.format(precision), found[name], found["step"], f"C{number}", style)
            for number, (precision, found) in enumerate(curves_of(rows).items())
            for name, (label, style) in quantities.items()
            if name in found
        ]
        charts.lines(axes, shown, title=title, xlabel="step", yscale="log")
        axes.set_ylim(top=100 * axes.get_ylim()[1])  # room for the legend
        axes.legend(frameon=False)
    panels[0].set_yscale("symlog", linthresh=SMALLEST)  # below it linear, because some angles are 0
    panels[0].set_ylim(0, 2e3)
    return figure


BENCHMARK = frame.Benchmark("reversible", ReversibleArguments, items, measure, sections, about, pictures)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
