"""Measure memory and time of reversible networks, against stored activations and checkpointing:

    python -m scripts.evidence.reversible out=FILE.json
    python -m scripts.evidence.reversible rounds=3 images=50 only=[budget,depths] out=FILE.json
    python -m scripts.evidence.reversible only=[budget] device=cuda out=FILE.json

Bytes and operations are counted, times are measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.schema.keys import key
from keepless import ABN, InPlaceABN, run_reversibly
from keepless.norms.backends.compiled import compiler_available
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode
from models import bodies
from models.blocks import Convolutions
from models.bodies import resnet110_cifar, revnet110_cifar
from models.bodies.revnet_units import ReversibleUnit
from models.recomputation import RECOMPUTE, choose_recomputation
from scripts.reports import frame
from scripts.reports import markdown as md
from scripts.reports.markdown import Columns, Rows, mib, section
from scripts.reports.measuring import compiled, operations_of, timed

STANDARD = "ResNet-110, std"
NORMS: dict[str, Callable[[int], nn.Module]] = {"std": partial(ABN, activation="relu"), "inplace": InPlaceABN}
DEPTHS = (4, 16, 64, 256)  # units
CHANNELS, SIDE, IMAGES = 32, 16, 4  # of the units of Table 1
BUDGETS = (1.0, 0.5)  # of torch.compile: the share of activations that it may keep
PUBLISHED = {  # MB, MemCNN's README
    "ResNet-32": 238.6,
    "ResNet-110": 810.7,
    "ResNet-164": 2452.8,
    "RevNet-38": 85.6,
    "RevNet-110": 85.7,
    "RevNet-164": 432.7,
}


@dataclass
class ReversibleArguments(frame.TimedArguments):
    images: int = key(100, above=0)  # per step on CIFAR


def items(arguments: ReversibleArguments) -> dict[str, tuple]:
    """{PART/…: (part, what of it)}"""
    chosen: list[tuple] = [("activations", title) for title in PUBLISHED]
    chosen += [*(("depths", count) for count in DEPTHS), ("budget",)]
    return {"/".join(map(str, item)): item for item in chosen}


def measure(arguments: ReversibleArguments, part: str, *what: Any) -> Rows:
    return [{"part": part, **row} for row in PARTS[part](arguments, *what)]


def loss_of(forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(forward(images), labels)


def step_of(network: nn.Module, forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> None:
    """Forward and backward pass. The previous step's gradients live until the loss is computed."""
    loss = loss_of(forward, images, labels)
    network.zero_grad()
    loss.backward()


def activations(arguments: ReversibleArguments, title: str) -> Iterator[dict]:
    """Megabytes (10^6 bytes) that a step on 100 CIFAR images keeps, such as of "ResNet-32"."""
    build = getattr(bodies, f"{title.lower().replace('-', '')}_cifar")
    row: dict = {"network": title}
    for norm, layer in NORMS.items():
        with FakeTensorMode():
            network = build(layer, classes=10)
            images, labels = torch.empty(100, 3, 32, 32), torch.empty(100, dtype=torch.long)
            kept = kept_bytes(network, partial(loss_of, network, images, labels), [images])
            row |= {norm: kept / 1e6, "parameters": sum(parameter.numel() for parameter in network.parameters())}
    yield row


def _plain(units: Sequence[nn.Module], x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
    return x


def _segments(length: int, units: Sequence[nn.Module], x: Tensor) -> Tensor:
    for start in range(0, len(units), length):
        x = checkpoint(_plain, units[start : start + length], x, use_reentrant=False)
    return x


def _recursive(units: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Keep the input of each half, recursively: O(log L) memory, O(L log L) operations."""
    if len(units) == 1:
        return units[0](x)
    middle = len(units) // 2
    x = checkpoint(_recursive, units[:middle], x, use_reentrant=False)
    return checkpoint(_recursive, units[middle:], x, use_reentrant=False)


METHODS: dict[str, Callable[[Sequence[nn.Module], Tensor], Tensor]] = {
    "naive": _plain,
    "blocks": partial(_segments, 1),
    "sqrt": lambda units, x: _segments(round(math.sqrt(len(units))), units, x),
    "recursive": _recursive,
    "reversible": run_reversibly,
}


def chain(arguments: ReversibleArguments, count: int) -> Iterator[dict]:
    """RevNet's Table 1: every method on a chain of units, in float32 with standard norms."""
    torch.manual_seed(0)
    convs = Convolutions(CHANNELS, (CHANNELS, CHANNELS))
    units = nn.ModuleList(ReversibleUnit(convs, NORMS["std"]) for _ in range(count))
    x = torch.randn(IMAGES, CHANNELS, SIDE, SIDE, requires_grad=True)
    for method, run in METHODS.items():
        forward = partial(lambda run: run(list(units), x * 1), run)

        def step(forward: Callable[[], Tensor] = forward) -> None:
            forward().sum().backward()

        kept = kept_bytes(units, forward, [])
        step()  # gradients exist, so that they are not in the peak
        operations = operations_of(step)
        row = {"units": count, "method": method, "kept_bytes": kept, "peak_bytes": peak_bytes(step, "cpu")}
        yield {**row, "flops": operations}


def budget(arguments: ReversibleArguments) -> Rows:
    """Steps of ResNet-110 and RevNet-110 on CIFAR images in float32: time, bytes kept, peak."""
    images = torch.randn(arguments.images, 3, 32, 32, device=arguments.device)
    labels = torch.randint(10, (arguments.images,), device=arguments.device)
    steps, rows = {}, []
    for title, (network, run) in candidates(arguments.device).items():
        kept = kept_bytes(network, partial(loss_of, run, images, labels), [images]) if run is network else None
        steps[title] = partial(step_of, network, run, images, labels)
        steps[title]()  # compiles
        network.zero_grad()  # so that the step's own gradients count
        peak = peak_bytes(steps[title], arguments.device)
        rows.append({"method": title, "kept_bytes": kept, "peak_bytes": peak})
    times_ms = timed(steps, arguments.rounds, arguments.device)
    return [{**row, "times_ms": times_ms[str(row["method"])]} for row in rows]


def candidates(device: str) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """{title: network, and its forward pass}; compiled ones only where there is a compiler."""
    found: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {}
    for norm, layer in NORMS.items():
        for recompute in RECOMPUTE:
            network = resnet110_cifar(layer, classes=10).to(device)
            choose_recomputation(network, network, recompute)
            found[f"ResNet-110, {norm}" + ("" if recompute == "none" else f", {recompute}")] = network, network
        network = revnet110_cifar(layer, classes=10).to(device)
        found[f"RevNet-110, {norm}, reversible"] = network, network
    for share in BUDGETS if compiler_available(device) else ():
        network = resnet110_cifar(NORMS["std"], classes=10).to(device)
        found[f"ResNet-110, std, compiled, budget {share:g}"] = network, compiled(network, "inductor", share)
    return found


PARTS: dict[str, Callable[..., Iterable[dict]]] = {"activations": activations, "depths": chain, "budget": budget}


def about(arguments: dict) -> tuple[str, str]:
    title = f"Memory and time, on {frame.DEVICES[arguments['device']]}"
    return title, f"{arguments['rounds']} rounds; {arguments['images']} images of 32x32"


def sections(call: dict, _: str) -> Iterator[str]:
    kept, depths, budgets = (frame.rows_of(call, part) for part in PARTS)
    if kept:
        yield section("Activations kept of a step on 100 CIFAR images", md.columns(kept, ACTIVATIONS))
    if depths:
        yield section("RevNet's Table 1, measured", md.columns(beside(depths, "units"), DEPTH, left=2))
    if budgets:
        ordered = sorted(beside(budgets, "part"), key=lambda row: row["peak_bytes"])
        yield section("Memory against time", md.columns(ordered, BUDGET))


def beside(rows: Rows, by: str) -> Rows:
    """The rows, each with all methods of its group in row["beside"]. `by`: the key whose values are groups."""
    return [row for group in md.grouped(rows, [by], "method").values() for row in group.values()]


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
BUDGET: Columns = [
    ("method", "{method}"),
    ("kept, MiB", lambda row: mib(row["kept_bytes"])),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("time / standard", lambda row: f"{md.time_ratio(row['beside'], row['method'], STANDARD):.2f}"),
]

BENCHMARK = frame.Benchmark("reversible", ReversibleArguments, items, measure, about, sections)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
