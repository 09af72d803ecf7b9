"""Count memory and operations of reversible networks, against stored activations and checkpointing:

    python -m benchmarks.reversible out=FILE.json
    python -m benchmarks.reversible only=[depths] out=FILE.json
    python -m benchmarks.reversible only=[activations/RevNet-38] out=FILE.json

`only` chooses networks, or the part with stacks of units of growing depth.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import frame
from benchmarks.measuring import operations_of
from benchmarks.rows import Rows, compared, section
from keepless import ABN, InPlaceABN, run_reversibly
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode
from models import bodies
from models.blocks import Convolutions
from models.bodies.revnet_units import ReversibleUnit
from models.recomputation import run_blocks

NORMS: dict[str, Callable[[int], nn.Module]] = {"std": partial(ABN, activation="relu"), "inplace": InPlaceABN}
DEPTHS = (4, 16, 64, 256)  # units
CHANNELS, SIDE, IMAGES = 32, 16, 4  # of the units of Table 1
PUBLISHED = {  # MB, MemCNN's README
    "ResNet-32": 238.6,
    "ResNet-110": 810.7,
    "ResNet-164": 2452.8,
    "RevNet-38": 85.6,
    "RevNet-110": 85.7,
    "RevNet-164": 432.7,
}


def items(arguments: frame.Arguments) -> dict[str, tuple]:
    """{PART/…: (part, what of it)}"""
    measurements: list[tuple] = [("activations", title) for title in PUBLISHED]
    measurements += [("depths", count) for count in DEPTHS]
    return {"/".join(map(str, item)): item for item in measurements}


def measure(arguments: frame.Arguments, part: str, *values: Any) -> Rows:
    return [{"part": part, **row} for row in PARTS[part](*values)]


def _loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images), labels)


def activations(title: str) -> Iterator[dict]:
    """Megabytes (10^6 bytes) that a step on 100 CIFAR images saves, such as of "ResNet-32"."""
    build = getattr(bodies, f"{title.lower().replace('-', '')}_cifar")
    row: dict = {"network": title}
    with FakeTensorMode():
        images = torch.empty(100, 3, 32, 32)
        labels = torch.empty(100, dtype=torch.long)
        for norm, layer in NORMS.items():
            network = build(layer, classes=10)
            kept = kept_bytes(network, partial(_loss, network, images, labels), [images])
            row |= {norm: kept / 1e6, "parameters": sum(parameter.numel() for parameter in network.parameters())}
    yield row


def _by_blocks(recompute: str, units: Sequence[nn.Module], x: Tensor) -> Tensor:
    return run_blocks(units, x, recompute)[0][0]


def _recursive(units: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Keep the input of each half, recursively: O(log L) memory, O(L log L) operations."""
    if len(units) == 1:
        return units[0](x)
    middle = len(units) // 2
    x = checkpoint(_recursive, units[:middle], x, use_reentrant=False)
    return checkpoint(_recursive, units[middle:], x, use_reentrant=False)


Method = Callable[[Sequence[nn.Module], Tensor], Tensor]
METHODS: dict[str, Method] = {
    "naive": partial(_by_blocks, "none"),
    "blocks": partial(_by_blocks, "blocks"),
    "sqrt": partial(_by_blocks, "sqrt"),
    "recursive": _recursive,
    "reversible": run_reversibly,
}


def chain(count: int) -> Iterator[dict]:
    """RevNet's Table 1: every method on a chain of units, in float32 with standard norms."""
    torch.manual_seed(0)
    convs = Convolutions(CHANNELS, (CHANNELS, CHANNELS))
    units = nn.ModuleList(ReversibleUnit(convs, NORMS["std"]) for _ in range(count))
    x = torch.randn(IMAGES, CHANNELS, SIDE, SIDE, requires_grad=True)
    for method, run in METHODS.items():

        def loss(run: Method = run) -> Tensor:
            return run(list(units), x * 1).sum()

        kept = kept_bytes(units, loss, [])
        operations = operations_of(lambda: loss().backward())  # gradients now exist, so they are not in the peak
        peak = peak_bytes(lambda: loss().backward(), "cpu")
        yield {"units": count, "method": method, "kept_bytes": kept, "peak_bytes": peak, "flops": operations}


PARTS: dict[str, Callable[..., Iterable[dict]]] = {"activations": activations, "depths": chain}


def heading(arguments: dict) -> tuple[str, str]:
    return "Memory and operations", "Bytes and operations are exact"


def sections(call: dict, _: str) -> Iterator[str]:
    kept = frame.rows_of(call, "activations")
    if kept:
        rows = [{**row, "MemCNN's README": PUBLISHED[row["network"]]} for row in kept]
        yield section("Activation memory of a step on 100 CIFAR images, in MB", compared([rows]))
    chains = [rows for name, rows in call["items"].items() if name.startswith("depths/")]
    if chains:
        yield section("RevNet's Table 1, measured", compared(chains, "method", "naive"))


BENCHMARK = frame.Benchmark("reversible", frame.Arguments, items, measure, heading, sections)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
