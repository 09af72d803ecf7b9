"""What `recompute_activations` saves and costs in known networks, beside other methods to train in less memory:

    python -m scripts.bench_networks [device=cpu|cuda] [only=[resnet50,…]] out=FILE.json

Writes FILE.json, FILE.md (targets, tables) and FILE.png (bytes against time). FILE.json is written again after each
network: the same command continues a run that was stopped, and another `only` adds networks to it. `measure=false`
makes the page again from FILE.json.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from engine.distributed import device_of
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.frame import (
    MIB,
    Ratio,
    Target,
    begun,
    commits,
    environment_with,
    judged,
    page_text,
    ratio_of,
    table,
    target_table,
)
from scripts.evidence.measuring import Elsewhere
from scripts.evidence.methods import (
    ALL,
    BLOCKS,
    BUDGET,
    COMPILED,
    EXACT_DEFAULT,
    EXACT_IMAGES,
    EXACT_SIZE,
    METHODS,
    NETWORKS,
    ON_CPU,
    PACKAGES,
    PLAIN,
    RECOMPUTED,
    Measurement,
    chosen,
    installed,
    package_of,
)

# Kept bytes to reach, relative to the plain network.
LIMITS = {
    "densenet121": 0.25,  # 0.50 without recomputing concatenations
    "resnet50": 0.80,
    "mobilenet_v2": 0.66,
    "efficientnet_b0": 0.60,
    "regnet_y_400mf": 0.58,
    "convnext_tiny": 0.57,
    "vit_b_16": 0.68,
    "maxvit_t": 0.51,
}
LONGEST_ON_CPU, LONGEST_OF_ALL_ON_CPU = 1.06, 1.12  # time of a step to plain: median over the networks above, and each
LARGEST_DEVIATION = 1e-12

# Okabe and Ito's colours, which colour-blind readers can tell apart.
STYLES = {
    RECOMPUTED: ("#0072B2", "o"),
    BLOCKS: ("#D55E00", "s"),
    ON_CPU: ("#CC79A7", "D"),
    COMPILED: ("#999999", "^"),
    BUDGET: ("#009E73", "v"),
}

METHOD = f"""
- A step is a forward pass, a loss (the mean squares of all outputs) and a backward pass, in training mode and float32,
  with random images and weights (random as well where a network starts from zeros). Each network has a process to
  itself, in which every method gets a copy of it. On a CPU freed memory stays in the process, as in every training of
  this project.
- *Kept* is what autograd keeps of the network's forward pass for the backward pass, without parameters and images, each
  storage once; of a compiled network, what its graph keeps. *Peak* is the most that a step's tensors take at any
  moment, gradients of the parameters included, beyond weights and images.
- *Deviation* is the largest difference of a gradient from the plain network's, relative to the largest gradient, and
  *outputs* says whether they are equal to the bit: in float64 on {EXACT_IMAGES} images, with the same random numbers.
  The images have {EXACT_DEFAULT} pixels ({", ".join(f"{name}: {size}" for name, size in EXACT_SIZE.items())}).
- *{RECOMPUTED}* is `models.layers.recompute_activations(network)`.
- *{BLOCKS}* is `torch.utils.checkpoint` (not reentrant) around each block. Blocks are what the network's
  authors call so, such as residual blocks, dense layers, inception modules or encoder blocks: the outermost modules
  whose class is in `BLOCK_NAMES` of `scripts/evidence/methods.py`. The rest of the network is kept. alexnet and
  vgg16_bn have no blocks. Norms in blocks update their running statistics twice per step.
- *{ON_CPU}* is `torch.autograd.graph.save_on_cpu(pin_memory=True)` around the forward pass. It is measured on CUDA
  devices alone, and by its peak: on a CPU it only copies.
- *{COMPILED}* is `torch.compile` of the whole network for static shapes, after compilation; *{BUDGET}* sets
  `torch._functorch.config.activation_memory_budget = 0.5` as well.
"""


def markdown(result: dict, picture: str) -> str:
    """The page's text."""
    arguments, rows = result["arguments"], result["rows"]
    networks = _by_network(rows)
    size, images = arguments["image_size"], arguments["images"]
    about = f"{len(networks)} networks; {arguments['rounds']} rounds; {images} images of {size}x{size} per step"
    sections = [
        *target_table(targets(result)),
        *_summary(networks),
        *["", f"![memory against time of every network and method]({picture})"],
        *_every_network(networks),
        *_left_out(result["left_out"]),
    ]
    device = {"cpu": "CPU", "cuda": "CUDA"}[arguments["device"]]
    return page_text(result, f"Known networks in less memory, on {device}", about, sections, METHOD)


def targets(result: dict) -> list[Target]:
    """The targets of `recompute_activations`. Step times are judged only on CPUs."""
    networks = {name: rows for name, rows in _by_network(result["rows"]).items() if RECOMPUTED in rows}
    found = []
    for name, limit in LIMITS.items():
        values = {"": _ratio(networks[name], RECOMPUTED, "kept_bytes")} if name in networks else {}
        about = "at most 0.25 (0.50 without concatenations)" if name == "densenet121" else f"at most {limit:.2f}"
        found.append(judged(f"kept bytes to plain, {name}", about, values, at_most=limit))
    if result["arguments"]["device"] == "cpu":
        times = {name: _time(networks[name], RECOMPUTED).median for name in LIMITS if name in networks}
        median = {"": statistics.median(times.values())} if len(times) == len(LIMITS) else {}
        about, limit = "time of a step to plain", LONGEST_ON_CPU
        found.append(judged(f"{about}, median of these", f"at most {limit}", median, at_most=limit))
        limit = LONGEST_OF_ALL_ON_CPU
        found.append(judged(f"{about}, each of these", f"at most {limit}", times, at_most=limit))
    deviations = {name: rows[RECOMPUTED]["deviation"] for name, rows in networks.items()}
    about = "largest deviation of a gradient in float64, every network"
    found.append(judged(about, "at most 1e-12", deviations, at_most=LARGEST_DEVIATION, text="{:.0e}"))
    return found


def _by_network(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{network: {method: row}}"""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        found.setdefault(row["network"], {})[row["method"]] = row
    return found


def _ratio(rows: dict[str, dict], method: str, kind: str) -> float:
    return rows[method][kind] / rows[PLAIN][kind]


def _time(rows: dict[str, dict], method: str) -> Ratio:
    return ratio_of(rows[method]["times_ms"], rows[PLAIN]["times_ms"])


def _summary(networks: dict[str, dict[str, dict]]) -> Iterator[str]:
    """Medians over networks."""
    titles = ["method", "networks", "kept to plain", "peak to plain", "time to plain"]
    lines = []
    for method in METHODS[1:]:
        chosen = [rows for rows in networks.values() if method in rows]
        kept = [_ratio(rows, method, "kept_bytes") for rows in chosen if rows[method]["kept_bytes"] is not None]
        values = (
            kept,
            [_ratio(rows, method, "peak_bytes") for rows in chosen],
            [_time(rows, method).median for rows in chosen],
        )
        if chosen:
            lines.append([method, str(len(chosen)), *map(_range, values)])
    yield from ("", "## Summary", "", "Medians over networks, with the smallest and the largest:", "")
    yield from table(titles, lines)


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})" if values else ""


def _every_network(networks: dict[str, dict[str, dict]]) -> Iterator[str]:
    titles = ["network", "method", "kept, MiB", "to plain", "peak, MiB", "to plain", "step, ms", "to plain"]
    lines = [
        _line(name if method == PLAIN else "", rows, method)
        for name, rows in networks.items()
        for method in METHODS
        if method in rows
    ]
    yield from ("", "## Every network", "", *table([*titles, "deviation", "outputs"], lines, left=2))


def _line(name: str, rows: dict[str, dict], method: str) -> list[str]:
    row = rows[method]
    cells = [name, method]
    for kind in ("kept_bytes", "peak_bytes"):
        known = row[kind] is not None
        cells += [f"{row[kind] / MIB:.1f}", f"{_ratio(rows, method, kind):.2f}"] if known else ["", ""]
    cells += [f"{statistics.median(row['times_ms']):.0f}", f"{_time(rows, method):.2f}"]
    exact = (
        [f"{row['deviation']:.0e}", "equal" if row["same_outputs"] else "differ"] if "deviation" in row else ["", ""]
    )
    return [*cells, *exact] if method != PLAIN else [*cells[:3], "1", cells[4], "1", cells[6], "1", "", ""]


def _left_out(entries: list[dict]) -> Iterator[str]:
    if entries:
        yield from ("", "## Not measured", "")
    for entry in entries:
        yield f"- {entry['network']}, {entry['method']}: {entry['reason']}"


def chart(rows: list[dict]) -> Figure:
    """Bytes against time, relative to the plain network: a point for each network and method.

    The networks that have targets are named.
    """
    networks = _by_network(rows)
    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axis, kind, title in zip(panels, ("kept_bytes", "peak_bytes"), ("kept bytes", "peak of a step"), strict=True):
        for method, (colour, marker) in STYLES.items():
            points = {
                name: (_ratio(found, method, kind), _time(found, method).median)
                for name, found in networks.items()
                if method in found and found[method][kind] is not None
            }
            if points:
                axis.plot(*zip(*points.values(), strict=True), marker, color=colour, label=method, alpha=0.6)
            for name in [name for name in LIMITS if name in points and method == RECOMPUTED]:
                axis.plot(*points[name], marker, color=colour, markeredgecolor="black")
                axis.annotate(name, points[name], xytext=(4, 4), textcoords="offset points", fontsize=7)
        axis.plot(1, 1, "+", color="black", markersize=12, label=PLAIN)
        axis.set(xlabel=f"{title}, relative to plain")
        axis.grid(alpha=0.3)
    panels[0].set(ylabel="time of a step, relative to plain")
    handles = {
        label: handle for axis in panels for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=6, frameon=False)
    return figure


@dataclass
class NetworksArguments(frame.Arguments):
    """Arguments of the benchmark."""

    device: str = key("cpu", one_of=("cpu", "cuda"))
    threads: int = key(1, above=0)
    rounds: int = key(5, above=0)
    images: int = key(8, least=2)  # per step; some norms have one value per image
    image_size: int = key(224, above=0)  # pixels
    compiler: str | None = "inductor"  # of torch.compile; null compiles nothing
    only: list[str] = field(default_factory=list)  # networks; empty: all

    def check(self) -> None:
        """Raise ValueError for an impossible argument."""
        device_of(self.device)
        chosen(self.only)


def measure(arguments: NetworksArguments, clock: frame.Clock) -> Iterator[dict]:
    """Measure one network after the other; yield the record so far after each.

    Networks in the record of an earlier call are not measured again, unless even the plain network failed.
    """
    environment = environment_with(PACKAGES.values())
    before = begun(arguments, environment)
    rows = before.get("rows", [])
    done = {row["network"] for row in rows}
    left_out = [entry for entry in before.get("left_out", []) if entry["network"] in done]
    environment |= {"threads": arguments.threads, "commit": commits(before, environment)}

    def record() -> dict:
        seconds = round(before.get("seconds", 0) + clock.seconds, 1)
        in_order = sorted(rows, key=lambda row: NETWORKS.index(row["network"]))
        return {"environment": environment, "seconds": seconds, "rows": in_order, "left_out": left_out}

    for name in chosen(arguments.only):
        if name in done:
            continue
        if not installed(name):
            left_out.append({"network": name, "method": ALL, "reason": f"{package_of(name)} is not installed"})
            continue
        try:
            measured = measured_alone(name, arguments)
        except Exception as error:  # e.g. out of memory: the other networks can still be measured
            measured = [], [{"network": name, "method": ALL, "reason": frame.reason(error)}]
        rows += measured[0]
        left_out += measured[1]
        clock.report(name)
        yield record()
    yield record()


def measured_alone(name: str, arguments: NetworksArguments) -> tuple[list[dict], list[dict]]:
    """See `methods.measured`. The network has a process to itself, whose memory is free afterwards."""
    given = (arguments.device, arguments.images, arguments.image_size, arguments.rounds, arguments.compiler)
    with Elsewhere(Measurement, arguments.threads) as process:
        return process.call("of", name, *given)


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw its chart to `picture`."""
    chart(result["rows"]).savefig(picture, dpi=110)
    return markdown(result, picture.name)


run, main = frame.benchmark("bench_networks", NetworksArguments, measure, page)
