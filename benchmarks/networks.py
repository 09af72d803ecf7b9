"""Measure `recompute_activations` on known networks, with and without byte budgets, against other memory savers:

    python -m benchmarks.networks [device=cpu|cuda] out=FILE.json
    python -m benchmarks.networks only=[resnet50,densenet121] images=4 out=FILE.json
    python -m benchmarks.networks only=[vit_b_16] gradients=freed out=FILE.json
    python -m benchmarks.networks only=[resnet50] shares=[.3,.4,.5,.6,.8] precisions=[bfloat16] out=FILE.json

FILE.png shows memory against time.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks import frame, zoo
from benchmarks.measuring import PRECISIONS, WARM_UP_STEPS, Step, Steps, autocast, reason, timed
from benchmarks.rows import Rows, compared, medians, ratio_of, without_reasons
from benchmarks.zoo import NETWORKS, Forward, WithLoss, blocks_of
from engine.schema.keys import key
from keepless import plan, recompute_activations
from keepless.recompute.signatures.plans import FEWEST
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import is_capturing, tree_flatten, tree_unflatten
from scripts.reports import charts

PLAIN, RECOMPUTED, BLOCKS = "plain", "recompute_activations", "checkpoint per block"
ON_CPU = "save_on_cpu"  # no CUDA graph can be captured of it
Method = Callable[[nn.Module], Forward]  # gives a network's forward pass, and may change the network
AS_BLOCKS, IN_TIME_OF_BLOCKS = "peak of the checkpoints", "time of the checkpoints"
LEAST = "the least"
TRIED = [number / 40 for number in range(39, 1, -1)]  # shares of the baseline's peak to try for plans within a time
HOST = 0.04  # of a baseline step's time: estimate of a plan's overhead in Python


@dataclass
class NetworksArguments(frame.CapturedArguments):
    rounds: int = key(5, above=0)  # each measures every network and method once
    images: int = key(8, least=2)  # per step; some norms have one value per image
    image_size: int = key(224, above=0)  # pixels
    precisions: list[str] = key(["float32"], one_of=PRECISIONS)  # bfloat16 is autocast
    shares: list[float] = field(default_factory=lambda: [0.8, 0.6, 0.45, 0.33])  # of the baseline's peak: budgets
    # Before a step, zeroed in place (kept), or freed, as zero_grad() does: then all bytes, also those of budgets, are
    # with those that have come.
    gradients: str = key("kept", one_of=("kept", "freed"))


def training_step(network: nn.Module, inputs: Tensor, precision: str, frees: bool = False) -> None:
    """Forward and backward pass. Before it, gradients are zeroed, or freed."""
    network.zero_grad(set_to_none=frees)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    loss.backward()


def methods_of(network: nn.Module, device: str) -> dict[str, Method]:
    """The methods that apply to a network."""
    methods: dict[str, Method] = {PLAIN: lambda network: network, RECOMPUTED: recompute_activations}
    if blocks_of(network):
        methods[BLOCKS] = by_blocks
    if device == "cuda":
        methods[ON_CPU] = lambda network: partial(_saved_on_cpu, network)
    return methods


def by_blocks(network: nn.Module) -> nn.Module:
    """Activation checkpointing of every block."""
    for block in blocks_of(network):
        block.forward = partial(_checkpointed, block.forward)
    return network


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that saves only its inputs. They are passed one by one, so that those in lists also count as saved.

    While a CUDA graph is captured, the state of random numbers cannot be set back: a replay may take others again.
    """
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=not is_capturing())


def _saved_on_cpu(network: nn.Module, inputs: Tensor) -> object:
    with save_on_cpu(pin_memory=True):
        return network(inputs)


def gradients_of(network: nn.Module, inputs: Tensor, precision: str) -> Tensor:
    """The gradients of all trained parameters as one vector, always with the same random numbers."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)])


def deviation(gradients: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the reference's largest gradient."""
    return ((gradients - reference).abs().max() / reference.abs().max()).item()


def counts_of(
    network: WithLoss,
    method: str,
    inputs: Tensor,
    precision: str,
    reference: Tensor,
    frees: bool = False,
    **facts: int,
) -> tuple[dict, Step]:
    """What a method saves, its peak and how far its gradients are from the `reference`; and its step, warmed up.

    `frees`: steps free gradients first, so peaks include those that have come.
    """
    step = partial(training_step, network, inputs, precision, frees)
    device = inputs.device.type
    for _ in range(WARM_UP_STEPS):
        step()
    network.zero_grad(set_to_none=frees)  # not within what is measured
    row: dict = {**facts, "peak_bytes": peak_bytes(step, device)}
    if method != ON_CPU and "budget_bytes" not in facts:
        with autocast(device, precision):
            row["kept_bytes"] = kept_bytes(network.network, partial(network.run, inputs), [inputs])
    row["deviation"] = deviation(gradients_of(network, inputs, precision), reference)  # of the baseline: the noise
    return row, step


def items(arguments: NetworksArguments) -> dict[str, tuple]:
    pairs = [(name, precision) for precision in arguments.precisions for name in NETWORKS]
    return {"/".join(pair) if len(arguments.precisions) > 1 else pair[0]: pair for pair in pairs}


def measure(arguments: NetworksArguments, name: str, precision: str) -> Rows:
    """A row for each method and budget of a network, or the reason why it fails.

    {"network", "precision", "method", "peak_bytes", "times_ms", "kept_bytes": of known methods, "deviation": largest
    of a gradient from the baseline's, relative to the largest, "budget_bytes", "planned_bytes": of budgets}
    """
    plain, inputs = zoo.build_with_inputs(name, arguments.device, arguments.images, arguments.image_size)
    steps = Steps(arguments.device, "method", network=name, precision=precision)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        reference = gradients_of(WithLoss(plain), inputs, precision)
        frees = arguments.gradients == "freed"
        count = partial(counts_of, inputs=inputs, precision=precision, reference=reference, frees=frees)
        for method, change in methods_of(plain, arguments.device).items():
            network = copy.deepcopy(plain)
            steps.add(method, partial(count, WithLoss(network, change(network)), method))
        try:
            within_budgets(arguments, precision, steps, count, plain, inputs)
        except Exception as error:  # e.g. a network without a plan
            steps.rows["budgets"] = {**steps.common, "method": "budgets", "reason": reason(error)}
        graphs = [method for method in steps.rows if arguments.captured and method != ON_CPU]
        return steps.timed(arguments.rounds, graphs=graphs)


def within_budgets(
    arguments: NetworksArguments, precision: str, steps: Steps, count: Callable, plain: nn.Module, inputs: Tensor
) -> None:
    """Add the network with budgets: shares of its peak, and the peak and time of activation checkpointing."""
    checkpoints = steps.rows.get(BLOCKS, {}).get("peak_bytes")
    network = WithLoss(copy.deepcopy(plain))
    for parameter in [] if arguments.gradients == "freed" else network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with autocast(arguments.device, precision):
        first_plan = plan(network, inputs, 1.0)
        limits = {f"{share:.0%} of plain": int(share * first_plan.plain) for share in arguments.shares}
        if checkpoints:
            limits[AS_BLOCKS] = checkpoints
        tried_limits = [*limits.values(), *(int(share * first_plan.plain) for share in TRIED)]
        budgets = filter(FEWEST.__lt__, (limit - first_plan.gradients for limit in tried_limits))
        plans = plan(network, inputs, [*budgets, 1.0])
    if checkpoints:
        pair = {method: steps.steps[method] for method in (PLAIN, BLOCKS)}
        plain_ms, blocks_ms = map(statistics.median, timed(pair, arguments.rounds, arguments.device).values())
        fast = [row.peak for row in plans.rows if row.seconds <= max(0.0, blocks_ms / plain_ms - 1 - HOST)]
        limits[IN_TIME_OF_BLOCKS] = min(fast, default=plans.plain)
    least = plans.least + plans.gradients
    for label, limit in {**limits, LEAST: least}.items():
        if limit < least and label != AS_BLOCKS:
            continue  # no plan reaches this share
        limit = max(limit, least)
        budget = max(limit - plans.gradients, FEWEST)
        # The budget for a limit of time is the peak of the plan.
        peak = next((row.peak for row in plans.rows if budget == row.budget or limit == row.peak), least)
        trained_network = WithLoss(copy.deepcopy(plain))
        recompute_activations(trained_network, budget=budget)
        steps.add(label, partial(count, trained_network, label, budget_bytes=limit, planned_bytes=peak))


def heading(arguments: dict) -> tuple[str, str]:
    images = f"{arguments['images']} images of {arguments['image_size']}x{arguments['image_size']} per step"
    title = f"Memory and time of known networks, on {arguments['device'].upper()}"
    freed = "; gradients are freed before each step, and bytes include those that have come"
    return title, f"{arguments['rounds']} rounds; {images}" + (freed if arguments.get("gradients") == "freed" else "")


def sections(call: dict, picture: str) -> Iterator[str]:
    networks = call["items"].values()
    yield "Medians over networks, with the least and the most:"
    yield medians(networks, "method", PLAIN)
    plans = [row for rows in networks for row in rows if "planned_bytes" in row]
    if plans:
        over = max(0.0, *(row["peak_bytes"] / max(row["budget_bytes"], row["planned_bytes"]) - 1 for row in plans))
        yield f"{len(plans)} plans: measured peaks are at most {over:.1%} above budgets. Relative to *{BLOCKS}*:"
        yield medians(networks, "method", BLOCKS)
    if drawn_of(call):
        drawn = f"![peak and time of a step under byte budgets, and of activation checkpointing]({picture}.png)"
        yield f"{drawn}\n*{DRAWN}: lower left is better.*"
    yield compared(networks, "method", PLAIN)


STYLES = {  # method: its name in charts.METHOD_COLOURS, and its marker
    PLAIN: ("std", "*"),
    RECOMPUTED: ("recomputed", "D"),
    BLOCKS: ("checkpoint", "s"),
    ON_CPU: ("other", "P"),
}
SHOWN_AS = {PLAIN: "baseline", BLOCKS: "activation checkpointing of every block"}  # in the picture
DRAWN = "resnet50"
SLOWEST = 3  # times the baseline's: slower methods are outside of the picture


def drawn_of(call: dict) -> dict[str, dict]:
    """The rows of the network that is drawn, in the first precision, if it has budgets."""
    rows = without_reasons(next((rows for name, rows in call["items"].items() if name.split("/")[0] == DRAWN), []))
    return {row["method"]: row for row in rows} if any("planned_bytes" in row for row in rows) else {}


def picture(call: dict) -> Figure | None:
    """The picture for the README: peak and time of a network's budgets, as a line, beside the other methods.

    With both regimes: hollow without CUDA graphs, filled with them.
    """
    rows = drawn_of(call)
    arguments = call["arguments"]
    if not rows:
        return None
    figure, (axes,) = charts.panels(1, 1, (7.5, 3.6))
    regimes = [key for key in ("times_ms", "captured_ms") if rows[PLAIN].get(key)]
    for regime in regimes:
        _draw_regime(axes, rows, regime, is_hollow=regime != regimes[-1])
    images, side, device = (arguments[name] for name in ("images", "image_size", "device"))
    title = f"A training step of {DRAWN} on {images} images of {side} x {side}, on {device.upper()}"
    if len(regimes) > 1:
        title += "\nfilled: with CUDA graphs, hollow: without"
    axes.set(title=title, xlabel="peak memory, relative to the baseline", ylabel="time, relative to the baseline")
    axes.axhline(1, color=charts.GREY, linewidth=0.8)
    left, right = axes.get_xlim()
    axes.set(xlim=(min(0.2, left), max(1.03, right)))
    charts.legend(figure, columns=2)
    return figure


def _draw_regime(axes: Axes, rows: dict[str, dict], regime: str, is_hollow: bool) -> None:
    """Draw the best budgets and the other methods at their times with or without CUDA graphs, the key `regime`."""
    filling: Any = {"markerfacecolor": "white"} if is_hollow else {}
    points = {
        method: (row["peak_bytes"] / rows[PLAIN]["peak_bytes"], ratio_of(row[regime], rows[PLAIN][regime]).median)
        for method, row in rows.items()
        if row.get(regime)
    }
    plans = best([points[method] for method in points if "planned_bytes" in rows[method]])
    label = None if is_hollow else "recompute_activations, best budgets"
    colour = charts.METHOD_COLOURS["recomputed"]
    axes.plot(*zip(*plans, strict=True), "o-", color=colour, label=label, markersize=5, **filling)
    axes.annotate(f" {plans[-1][1]:.2f}", plans[-1], va="center", fontsize=8)
    for method, (name, marker) in STYLES.items():
        if method in points and points[method][1] < SLOWEST and (method != PLAIN or not is_hollow):
            label = None if is_hollow else SHOWN_AS.get(method, method)
            colour = charts.METHOD_COLOURS[name]
            axes.plot(*points[method], marker, color=colour, label=label, markersize=6, **filling)
            if method != PLAIN:
                axes.annotate(f"  {points[method][1]:.2f}", points[method], va="center", fontsize=8)


def best(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that none beats in both memory and time, by memory."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


BENCHMARK = frame.Benchmark("networks", NetworksArguments, items, measure, heading, sections, picture)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
