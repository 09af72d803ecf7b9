"""Measure `recompute_activations` on known networks, with and without byte budgets, against other memory savers:

    python -m scripts.evidence.networks [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.networks only=[resnet50,densenet121] images=4 out=FILE.json
    python -m scripts.evidence.networks only=[resnet50] shares=[.3,.4,.5,.6,.8] precisions=[bfloat16] out=FILE.json

FILE.png shows memory against time.
"""

import copy
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from matplotlib.figure import Figure
from torch import nn

from engine.schema.keys import key
from keepless import plan, recompute_activations
from scripts.evidence import methods, zoo
from scripts.evidence.methods import (
    AS_GRAPH,
    BLOCKS,
    BUDGET,
    COMPILED,
    ON_CPU,
    PLAIN,
    RECOMPUTED,
    Compared,
    WithLoss,
)
from scripts.evidence.zoo import NETWORKS
from scripts.reports import charts, frame
from scripts.reports import markdown as md
from scripts.reports.markdown import Columns, Rows, mib, section
from scripts.reports.measuring import PRECISIONS, autocast, timed

AS_BLOCKS, IN_TIME_OF_BLOCKS = "peak of the checkpoints", "time of the checkpoints"
LEAST = "the least"
TRIED = [number / 40 for number in range(39, 1, -1)]  # shares of the plain peak to try for plans within a time
HOST = 0.04  # of a plain step's time: estimate of a plan's overhead in Python


@dataclass
class NetworksArguments(frame.CapturedArguments):
    rounds: int = key(5, above=0)  # each measures every network and method once
    images: int = key(8, least=2)  # per step (an eighth as many texts); some norms have one value per image
    image_size: int = key(224, above=0)  # pixels
    precisions: list[str] = key(["float32"], one_of=PRECISIONS)  # bfloat16 is autocast
    shares: list[float] = field(default_factory=lambda: [0.8, 0.6, 0.45, 0.33])  # of the plain network's peak: budgets
    compiler: str | None = "inductor"  # of torch.compile; null compiles nothing


def items(arguments: NetworksArguments) -> dict[str, tuple]:
    several = len(arguments.precisions) > 1
    return {f"{name}/{each}" if several else name: (name, each) for each in arguments.precisions for name in NETWORKS}


def measure(arguments: NetworksArguments, name: str, precision: str) -> Rows:
    """A row for each method and budget of a network, or the reason why it fails. Raises if the plain network fails.

    {"network", "precision", "method", "peak_bytes", "times_ms", "kept_bytes": of known methods, "deviation": largest
    of a gradient from the plain network's, relative to the largest, "budget", "planned_bytes": of budgets}
    """
    plain, inputs = zoo.made(name, arguments.device, arguments.images, arguments.image_size)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        compared = Compared(name, precision, plain, inputs)
        for method in methods.methods_of(name, plain, arguments.device, arguments.compiler):
            network = copy.deepcopy(plain)
            compared.add(method, WithLoss(network, methods.forward_of(network, method, arguments.compiler)))
        try:
            within_budgets(arguments, compared, plain)
        except Exception as error:  # e.g. a network without a plan
            compared.failed.append({**compared.common, "method": "budgets", "reason": frame.reason(error)})
        rows = compared.timed(arguments.rounds)
        return rows + compared.captured(arguments.rounds) if arguments.captured else rows


def within_budgets(arguments: NetworksArguments, compared: Compared, plain: nn.Module) -> None:
    """Add the network with budgets: shares of its peak, and the checkpoints' peak and time."""
    inputs, rows = compared.inputs, compared.rows
    asked: dict[str, float | int] = {f"{share:.0%} of plain": share for share in arguments.shares}
    asked |= {AS_BLOCKS: rows[BLOCKS]["peak_bytes"]} if BLOCKS in rows else {}
    with autocast(inputs.device.type, compared.precision):
        planned = plan(WithLoss(copy.deepcopy(plain)), inputs, [*asked.values(), *TRIED, 1.0])
    if BLOCKS in rows:
        both = {method: compared.steps[method] for method in (PLAIN, BLOCKS)}
        plain_ms, blocks_ms = map(statistics.median, timed(both, arguments.rounds, inputs.device.type).values())
        fast = [row.peak for row in planned.rows if row.seconds <= max(0.0, blocks_ms / plain_ms - 1 - HOST)]
        asked[IN_TIME_OF_BLOCKS] = min(fast, default=planned.plain)
    for label, wanted in {**asked, LEAST: planned.least}.items():
        budget = int(wanted * planned.plain) if isinstance(wanted, float) else wanted
        if budget < planned.least and label != AS_BLOCKS:
            continue  # no plan reaches this share
        trained = WithLoss(copy.deepcopy(plain))
        recompute_activations(trained, budget=max(budget, planned.least))
        # The budget for a limit of time is the peak of the plan.
        peak = next((row.peak for row in planned.rows if budget in (row.budget, row.peak)), planned.least)
        compared.add(label, trained, budget=budget if budget >= planned.least else None, planned_bytes=peak)


Networks = dict[str, dict[str, dict]]  # rows by network and method
STYLES = {
    PLAIN: (charts.BLACK, "*"),
    RECOMPUTED: (charts.SKY, "o"),
    BLOCKS: (charts.VERMILION, "s"),
    ON_CPU: (charts.PURPLE, "D"),
    COMPILED: (charts.GREY, "^"),
    BUDGET: (charts.GREEN, "v"),
}
DRAWN = "resnet50"


def about(arguments: dict) -> tuple[str, str]:
    what = f"Memory and time of known networks, {'also within' if arguments['shares'] else 'without'} budgets"
    images = f"{arguments['images']} images of {arguments['image_size']}x{arguments['image_size']} per step"
    return f"{what}, on {frame.DEVICES[arguments['device']]}", f"{arguments['rounds']} rounds; {images}"


def networks_in(call: dict) -> Networks:
    """The name has the precision if there are several."""
    by = ["network", "precision"] if len(call["arguments"]["precisions"]) > 1 else ["network"]
    return md.grouped(frame.rows_of(call), by, "method")


def sections(call: dict, picture: str) -> Iterator[str]:
    networks = networks_in(call)
    rows = [row for of_network in networks.values() for row in of_network.values()]
    yield f"{len(networks)} networks. Medians over networks, with the smallest and the largest:"
    yield _summary(networks)
    yield "\n".join(_of_plans(networks))
    if alone(networks):
        drawn = f"![peak and time of a step under byte budgets, and of its rivals]({picture}.png)"
        yield f"{drawn}\n*{DRAWN}: lower left is better.*"
    yield section("Every network", md.columns(rows, COLUMNS, left=2))


def _ratio(rows: dict[str, dict], method: str, kind: str, to: str = PLAIN) -> float:
    """Bytes relative to plain, or to another method; NaN if they are not known."""
    return rows[method][kind] / rows[to][kind] if rows[method].get(kind) and rows[to].get(kind) else math.nan


def _time(rows: dict[str, dict], method: str, to: str = PLAIN) -> float:
    return md.time_ratio(rows, method, to).median


def _summary(networks: Networks) -> str:
    having = {method: [rows for rows in networks.values() if method in rows] for method in methods.METHODS[1:]}
    shown: Columns = [
        ("method", str),
        ("networks", lambda method: str(len(having[method]))),
        ("kept / plain", lambda method: _range(_ratio(rows, method, "kept_bytes") for rows in having[method])),
        ("peak / plain", lambda method: _range(_ratio(rows, method, "peak_bytes") for rows in having[method])),
        ("time / plain", lambda method: _range(_time(rows, method) for rows in having[method])),
    ]
    return md.columns(filter(having.get, having), shown)


def _range(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.2f} ({min(known):.2f} – {max(known):.2f})" if known else ""


def _of_plans(networks: Networks) -> Iterator[str]:
    """How exact plans are, and where they win or lose against checkpoints."""
    plans = [row for rows in networks.values() for row in rows.values() if "planned_bytes" in row]
    if not plans:
        return
    over = max(0.0, *(row["peak_bytes"] / max(row["budget"] or 0, row["planned_bytes"]) - 1 for row in plans))
    most = max(row["deviation"] for row in plans)
    exact = f"measured peaks are at most {over:.1%} above budgets, the largest deviation of a gradient is {most:g}"
    yield f"- {len(plans)} plans: {exact}."
    own = {name: rows for name, rows in networks.items() if AS_BLOCKS in rows}
    if own:
        to_rival = {
            name: (_ratio(rows, AS_BLOCKS, "peak_bytes", BLOCKS), _time(rows, AS_BLOCKS, BLOCKS))
            for name, rows in own.items()
        }
        behind = {name: ratios for name, ratios in to_rival.items() if ratios[0] > 1.01 or round(ratios[1], 2) > 1}
        ours, theirs = (statistics.median(_time(rows, each) for rows in own.values()) for each in (AS_BLOCKS, BLOCKS))
        medians = f"{ours:.2f} of the plain time, with *{BLOCKS}* {theirs:.2f} (medians of {len(own)} networks)"
        others = ", ".join(f"{name} (peak {x:.2f}, time {y:.2f})" for name, (x, y) in behind.items()) or "none"
        strictly = sum(peak <= 1 and time <= 1 for peak, time in to_rival.values())
        yield (
            f"- With the {AS_BLOCKS}, a step takes {medians}. Neither peak (within 1 %) nor time (within 0.5 %) is "
            f"above the rival's in {len(own) - len(behind)} of {len(own)}, without these tolerances in {strictly}. "
            f"The others, relative to the rival: {others}."
        )
    graphs = {
        name: [_time(rows, each + AS_GRAPH, PLAIN + AS_GRAPH) for each in (AS_BLOCKS, BLOCKS)]
        for name, rows in networks.items()
        if {AS_BLOCKS + AS_GRAPH, BLOCKS + AS_GRAPH, PLAIN + AS_GRAPH} <= rows.keys()
    }
    if graphs:
        each = ", ".join(f"{name} {ours:.2f} and {theirs:.2f}" for name, (ours, theirs) in graphs.items())
        yield (
            f"- As CUDA graphs, with the {AS_BLOCKS} and with *{BLOCKS}*, relative to a captured plain step: {each}."
        )
    shares = [_ratio(rows, IN_TIME_OF_BLOCKS, "peak_bytes") for rows in networks.values() if IN_TIME_OF_BLOCKS in rows]
    if shares:
        yield f"- In the {IN_TIME_OF_BLOCKS}, the median peak is {statistics.median(shares):.2f} of plain."


def _named(row: dict) -> str:
    return row["network"] if row["precision"] == "float32" else f"{row['network']}, {row['precision']}"


COLUMNS: Columns = [
    ("network", lambda row: _named(row) if row["method"] == PLAIN else ""),
    ("method or budget", "{method}"),
    ("kept, MiB", lambda row: mib(row.get("kept_bytes"))),
    ("/ plain", lambda row: md.relative(row, PLAIN, "kept_bytes")),
    ("planned, MiB", lambda row: mib(row.get("planned_bytes"))),
    ("peak, MiB", lambda row: mib(row.get("peak_bytes"))),
    ("/ plain", lambda row: md.relative(row, PLAIN, "peak_bytes")),
    ("step, ms", lambda row: f"{md.median_ms(row):.0f}"),
    ("/ plain", lambda row: md.relative_time(row, PLAIN)),
    ("deviation", lambda row: f"{row['deviation']:.0e}" if "deviation" in row else ""),
]


def alone(networks: Networks) -> dict[str, dict]:
    """The rows of the network that is drawn, if it has budgets."""
    rows = networks.get(DRAWN, {})
    return rows if any("planned_bytes" in row for row in rows.values()) else {}


def picture(call: dict) -> Figure | None:
    """The picture for the README: peak and time of a network's budgets, as a line, beside each rival's point."""
    rows, arguments = alone(networks_in(call)), call["arguments"]
    if not rows:
        return None
    figure, (axes,) = charts.panels(1, 1, (7.5, 3.6))

    def point(method: str) -> tuple[float, float]:
        return _ratio(rows, method, "peak_bytes"), _time(rows, method)

    peaks, times = zip(*sorted(point(method) for method, row in rows.items() if "planned_bytes" in row), strict=True)
    axes.plot(peaks, times, ".-", color=charts.BLUE, label="recompute_activations with budgets", markersize=4)
    for method, (colour, marker) in STYLES.items():
        if method in rows:
            axes.plot(*point(method), marker, color=colour, label=method, markersize=4)
    images, side, device = (arguments[name] for name in ("images", "image_size", "device"))
    title = f"A training step of {DRAWN} on {images} images of {side} x {side}, on {frame.DEVICES[device]}"
    axes.set(title=title, xlabel="peak memory, relative to plain PyTorch", ylabel="time, relative to plain PyTorch")
    axes.axhline(1, color=charts.GREY, linewidth=0.8)
    axes.set(xlim=(0.2, 1.25), ylim=(0.85, max(1.4, 0.05 + max(_time(rows, method) for method in rows))))
    axes.locator_params(axis="x", nbins=6)
    charts.legend(figure, columns=3)
    return figure


BENCHMARK = frame.Benchmark("networks", NetworksArguments, items, measure, about, sections, picture, apart=True)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
