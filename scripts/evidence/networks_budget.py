"""Measure `recompute_activations` with a byte budget on known networks, beside checkpoints and the compiler's budget:

    python -m scripts.evidence.networks_budget [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.networks_budget only=[resnet50,densenet121] images=2 out=FILE.json
    python -m scripts.evidence.networks_budget measure=false out=FILE.json

FILE.json is written again after each network: the same command continues a run that was stopped, and another `only`
adds networks to it. FILE.png shows the peak against time, a panel for each network.
"""

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from keepless.budget.execution import ByPlan
from keepless.budget.search import Choice, frontier
from keepless.budget.simulation import plain_peak
from keepless.budget.step import Plan
from keepless.budget.traced_step import traced_step
from keepless.recompute.recording import Recording
from scripts.evidence import frame, methods
from scripts.evidence.frame import mib, time_ratio
from scripts.evidence.measuring import peak_bytes, timed
from scripts.evidence.methods import (
    BLOCKS,
    BUDGET,
    PLAIN,
    RECOMPUTED,
    Measured,
    NetworksArguments,
    deviation,
    gradients_of,
)
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns

Rows = dict[str, dict]  # of one network, by method

SHARES = (0.8, 0.6, 0.45, 0.33, 0.0)  # of the plain network's peak; 0: the least
AS_BLOCKS, IN_TIME_OF_BLOCKS, AS_COMPILED = "peak of the checkpoints", "time of the checkpoints", "peak of the compiler"
IN_TIME = "in time"
TIME_LIMITS = {"convnext_tiny": 1.10, "resnet50": 1.12, "densenet121": 1.12, "mobilenet_v2": 1.15}  # of a step to plain
ON_THE_FRONT_PAGE = "resnet50"
NETWORKS = [name for name in methods.NETWORKS if not name.startswith("frozen/")]


def page(result: dict, name: str) -> str:
    networks = frame.grouped(result["rows"], ["network"], "method")
    return methods.page_text(
        "networks_budget",
        result,
        picture=f"![peak against time of every network]({name}.png)",
        networks=len(networks),
        comparison=_comparison(networks),
        time_limits=", ".join(f"{limit:.2f} ({name})" for name, limit in TIME_LIMITS.items()),
        every_network=columns([row for rows in networks.values() for row in rows.values()], COLUMNS, left=2),
    )


def _peak(rows: Rows, method: str) -> float:
    return rows[method]["peak_bytes"] / rows[PLAIN]["peak_bytes"]


def _times(rows: Rows, method: str, other: str) -> float:
    return time_ratio(rows, method, other).median


def _comparison(networks: dict[str, Rows]) -> str:
    """How exact plans are, and where they are ahead of checkpoints and of the compiler, or behind."""
    plans = [row for rows in networks.values() for row in rows.values() if "planned_bytes" in row]
    if not plans:
        return ""
    off = max(abs(row["peak_bytes"] / row["planned_bytes"] - 1) for row in plans)
    deviation = max(row["deviation"] for row in plans)
    found = (
        f"measured peaks are within {off:.1%} of the planned ones, the largest deviation of a gradient is {deviation:g}"
    )
    lines = [f"- {len(plans)} plans: {found}."]
    for asked, rival in ((AS_BLOCKS, BLOCKS), (AS_COMPILED, BUDGET)):
        names = [name for name, rows in networks.items() if asked in rows]
        if names:
            behind = _behind({name: networks[name] for name in names}, asked, rival)
            ours, theirs = (
                statistics.median(_times(networks[name], method, PLAIN) for name in names) for method in (asked, rival)
            )
            medians = f"{ours:.2f} of the plain time, with *{rival}* {theirs:.2f} (medians of {len(names)} networks)"
            ahead = f"{len(names) - len(behind)} of {len(names)}"
            not_ahead = ", ".join(f"{name} (peak {x:.2f}, time {y:.2f})" for name, (x, y) in behind.items())
            lines.append(
                f"- With the {asked}, a step takes {medians}. Neither peak nor time is above the rival's in {ahead}. "
                f"The others, relative to the rival: {not_ahead or 'none'}."
            )
    shares = [_peak(rows, IN_TIME_OF_BLOCKS) for rows in networks.values() if IN_TIME_OF_BLOCKS in rows]
    if shares:
        lines.append(f"- In the {IN_TIME_OF_BLOCKS}, the median peak is {statistics.median(shares):.2f} of plain.")
    return "\n".join(lines)


def _behind(networks: dict[str, Rows], asked: str, rival: str) -> dict[str, tuple[float, float]]:
    """Where a plan's peak is over 1 % higher than a rival's, or its time longer: both relative to the rival's."""
    found = {
        name: (_peak(rows, asked) / _peak(rows, rival), _times(rows, asked, rival)) for name, rows in networks.items()
    }
    return {name: (peak, time) for name, (peak, time) in found.items() if peak > 1.01 or round(time, 2) > 1}


def _share(row: dict) -> str:
    return f"{row['peak_bytes'] / row['beside'][PLAIN]['peak_bytes']:.2f}"


COLUMNS: Columns = [
    ("network", lambda row: row["network"] if row["method"] == PLAIN else ""),
    ("method or budget", "{method}"),
    ("planned, MiB", lambda row: mib(row.get("planned_bytes"))),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("/ plain", _share),
    ("step, ms", lambda row: f"{statistics.median(row['times_ms']):.0f}"),
    ("/ plain", lambda row: frame.relative_time(row, PLAIN)),
    ("deviation", lambda row: f"{row['deviation']:.0e}" if "deviation" in row else ""),
]
STYLES = {
    RECOMPUTED: ("recompute_activations without a budget", charts.SKY, "o"),
    BLOCKS: (BLOCKS, charts.VERMILION, "s"),
    BUDGET: (BUDGET, charts.GREEN, "v"),
}


def pictures(result: dict) -> dict[str, Figure]:
    rows = sorted(result["rows"], key=lambda row: methods.NETWORKS.index(row["network"]))
    networks = frame.grouped(rows, ["network"], "method")
    if not networks:
        return {}
    count = math.ceil(len(networks) / 4)
    figure, panels = charts.panels(count, 4, (14, 2.6 * count), sharex=True, sharey=True)
    for axes, (name, found) in zip(panels, networks.items(), strict=False):
        _draw(axes, found, title=name)
    for axes in panels[len(networks) :]:
        axes.set_visible(False)
    for axes in panels[::4]:
        axes.set(ylabel="time, relative to plain", ylim=(0.8, 1.6))
    for axes in panels[max(0, len(networks) - 4) : len(networks)]:  # the lowest of each column
        axes.set(xlabel="peak, relative to plain")
        axes.tick_params(labelbottom=True)
    charts.legend(figure, columns=4)
    figures = {"": figure}
    if ON_THE_FRONT_PAGE in networks:
        images, size, device = (result["arguments"][name] for name in ("images", "image_size", "device"))
        title = (
            f"A training step of {ON_THE_FRONT_PAGE} on {images} images of {size} x {size}, on {frame.DEVICES[device]}"
        )
        figures[f"_{ON_THE_FRONT_PAGE}"] = _alone(networks[ON_THE_FRONT_PAGE], title)
    return figures


def _draw(axes: Axes, found: Rows, **labels: Any) -> None:
    """Peak against time of a network's budgets and their rivals."""
    ours = [(_peak(found, method), _times(found, method, PLAIN)) for method in found if "budget" in found[method]]
    x, y = zip(*sorted(ours), strict=True) if ours else ((), ())
    charts.lines(axes, [charts.Series("recompute_activations with budgets", y, x, charts.BLUE, ".-")])
    rivals = [
        charts.Series(label, [_times(found, method, PLAIN)], [_peak(found, method)], colour, marker)
        for method, (label, colour, marker) in STYLES.items()
        if method in found
    ]
    charts.points(axes, rivals, **labels)


def _alone(found: Rows, title: str) -> Figure:
    """The picture for the README: budgets on their own, each rival named beside its point."""
    figure, (axes,) = charts.panels(1, 1, (7.5, 3.6))
    _draw(
        axes,
        found,
        title=title,
        xlabel="peak memory, relative to plain PyTorch",
        ylabel="time, relative to plain PyTorch",
    )
    axes.plot(1, 1, "*", color=charts.BLACK, markersize=9, label="plain PyTorch")
    axes.axhline(1, color=charts.GREY, linewidth=0.8)
    axes.set(xlim=(0.2, 1.05), ylim=(0.95, 1.4))
    charts.legend(figure, columns=3)
    return figure


def measure(arguments: NetworksArguments, clock: frame.Clock) -> Iterator[dict]:
    if arguments.only and not {*arguments.only} & {*NETWORKS}:
        raise ValueError(f"only={arguments.only}: frozen networks are not measured within budgets; give others")
    yield from methods.each(arguments, clock, NETWORKS, measured)


class Trained(nn.Module):
    """A network and its loss in one module, so that a plan counts the loss, which may dominate in segmentation."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        return methods.mean_squares(self.network(pixels))


def measured(name: str, device: str, images: int, size: int, rounds: int, compiler: str | None) -> Measured:
    """Rows of a network: the rivals, and plans for `SHARES`, for the rivals' peaks, and for the rivals' times.

    {"network", "method", "peak_bytes", "times_ms"}; of plans also "budget": bytes, None where a time was asked for;
    "planned_bytes", "deviation": largest deviation of a gradient from the plain network's, relative to the largest
    """
    plain = methods.random_network(name, size).to(device)
    pixels = torch.randn(images, 3, size, size, device=device)
    steps: dict[str, Callable[[], object]] = {}

    def start(method: str) -> dict:
        network = copy.deepcopy(plain)
        forward = methods.forward_of(network, method, compiler)
        step = partial(training_step, network, partial(methods.loss_of, forward), pixels)
        for _ in range(methods.WARM_UP_STEPS):  # compiles
            step()
        peak = peak_bytes(step, device)
        steps[method] = step
        return {"peak_bytes": peak}

    compared = [method for method in methods.methods_of(name, plain, device, compiler) if method in (PLAIN, *STYLES)]
    rows, left_out = methods.each_method(name, compared, start)
    torch.manual_seed(0)
    reference = gradients_of(plain, methods.loss_of(plain, pixels))
    network = Trained(copy.deepcopy(plain))
    training_step(network, network, pixels)
    step, _ = traced_step(network, (pixels,), {})
    choices = frontier(step)
    seconds = {method: statistics.median(times) / 1e3 for method, times in timed(steps, rounds, device).items()}
    for label, budget, choice in _asked(name, choices, plain_peak(step), rows, seconds):
        loss = partial(_planned, network, choice.plan(step))
        steps[label] = partial(training_step, network, loss, pixels)
        found = {"budget": budget, "planned_bytes": choice.peak, "planned_seconds": round(choice.seconds, 5)}
        torch.manual_seed(0)
        found["deviation"] = deviation(gradients_of(network, loss(pixels)), reference)
        rows[label] = {**found, "peak_bytes": peak_bytes(steps[label], device)}
    times_ms = timed(steps, rounds, device)
    return (
        [{"network": name, "method": method, **row, "times_ms": times_ms[method]} for method, row in rows.items()],
        left_out,
    )


def _asked(
    name: str, choices: list[Choice], plain: int, rows: Rows, seconds: dict[str, float]
) -> Iterator[tuple[str, int | None, Choice]]:
    """Yields (label, budget in bytes or None for a time limit, plan)."""

    def within(budget: int) -> Choice:
        return next((choice for choice in choices if choice.peak <= budget), choices[-1])

    def in_time(limit: float) -> Choice:
        """The lowest peak in so many seconds more than without a plan."""
        return min((choice for choice in choices if choice.seconds <= limit), key=lambda choice: choice.peak)

    for share in SHARES:
        budget = int(share * plain) or choices[-1].peak
        if budget >= choices[-1].peak:
            yield f"{share:.0%} of plain" if share else "the least", budget, within(budget)
    for method, label in ((BLOCKS, AS_BLOCKS), (BUDGET, AS_COMPILED)):
        if method in rows:
            budget = rows[method]["peak_bytes"]
            yield label, budget if budget >= choices[-1].peak else None, within(budget)
    host = 0.04 * seconds[PLAIN]  # estimate of Python's own overhead of a plan
    if BLOCKS in rows:
        yield IN_TIME_OF_BLOCKS, None, in_time(max(0.0, seconds[BLOCKS] - seconds[PLAIN] - host))
    if name in TIME_LIMITS:
        yield IN_TIME, None, in_time((TIME_LIMITS[name] - 1) * seconds[PLAIN] - host)


def training_step(network: nn.Module, loss: Callable[[Tensor], Tensor], pixels: Tensor) -> None:
    """Forward and backward pass. Gradients are there before, and zeroed."""
    network.zero_grad(set_to_none=False)
    loss(pixels).backward()


def _planned(network: Trained, plan: Plan, pixels: Tensor) -> Tensor:
    with Recording(ByPlan([plan], kept_before=()), inputs=[pixels]):
        return network(pixels)


run, main = frame.benchmark("networks_budget", NetworksArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
