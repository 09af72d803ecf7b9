"""Compare a step that repeats parts of its forward pass with the baseline: gradients, and statistics that move:

    python -m benchmarks.repetition out=FILE.json
    python -m benchmarks.repetition only=[RReLU] out=FILE.json
    python -m benchmarks.repetition only=[BatchNorm,transformer] out=FILE.json

`recompute_activations` within four budgets, activation checkpointing of every block, and the compiler's memory budget,
which needs a C++ compiler.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from benchmarks import frame
from benchmarks.compiling import compiling
from benchmarks.networks import by_blocks, deviation
from benchmarks.rows import Rows, without_reasons
from benchmarks.zoo import WithLoss, blocks_of
from keepless import recompute_activations
from scripts.reports.markdown import table

SHARES = (0.9, 0.8, 0.7, 0.6)  # of the baseline's peak: budgets
OURS = "recompute_activations"
Forward = Callable[[nn.Module], Callable]  # of a network


def resnet(activation: nn.Module) -> nn.Module:
    """A small ResNet with another activation."""
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    for block in (network, *blocks_of(network)):
        block.relu = activation
    return network


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


class Block(nn.Sequential):
    """It counts as a block, see `blocks_of`."""


def perceptron() -> nn.Module:
    layers = (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2))
    return nn.Sequential(*(Block(*copy.deepcopy(layers)) for _ in range(4)))


IMAGES, TEXTS = (8, 3, 128, 128), (4, 64, 64)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (lambda: resnet(nn.ReLU()), IMAGES),
    "RReLU": (lambda: resnet(nn.RReLU()), IMAGES),
    "dropout": (perceptron, (512, 64)),
    "transformer": (encoder, TEXTS),
}
COMPILED = ("dropout",)  # others take minutes to compile


def measure(arguments: frame.Arguments, name: str) -> Rows:
    """A row for each method; "moved": how often running statistics move at most.

    {"network", "method", "deviation": largest of a gradient from the baseline's, relative to the largest, None if it
    is not a number, "moved", "identical": whether gradients and buffers are, bitwise}
    """
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    plain = make()
    inputs = torch.randn(shape, requires_grad=True)
    plain_gradients, plain_buffers = after_step(copy.deepcopy(plain), inputs)
    rows = []
    for method, (change, budget) in methods(name).items():
        gradients, buffers = after_step(copy.deepcopy(plain), inputs, change, budget)
        error = deviation(gradients, plain_gradients)
        row: dict = {"network": name, "method": method, "deviation": error if isfinite(error) else None}
        counts = [int(value) for key, value in buffers.items() if key.endswith("num_batches_tracked")]
        if counts:
            row["moved"] = max(counts)
        are_equal = all(torch.equal(value, plain_buffers[key]) for key, value in buffers.items())
        rows.append({**row, "identical": are_equal and torch.equal(gradients, plain_gradients)})
    return rows


def methods(name: str) -> dict[str, tuple[Forward, float]]:
    """By name: what makes the forward pass of a network, and may change it; the compiler's budget."""
    methods_by_name: dict[str, tuple[Forward, float]] = {}
    for share in SHARES:
        methods_by_name[f"{OURS}, budget={share}"] = partial(recompute_activations, budget=share), 1.0
    for reentrant in (False, True):
        methods_by_name[f"checkpoint, use_reentrant={reentrant}"] = partial(by_blocks, use_reentrant=reentrant), 1.0
    for budget in (1.0, 0.5) if name in COMPILED else ():
        methods_by_name[f"torch.compile, activation_memory_budget={budget}"] = torch.compile, budget
    return methods_by_name


def after_step(
    network: nn.Module, inputs: Tensor, change: Forward = lambda network: network, budget: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients and buffers of the first step."""
    torch.compiler.reset()
    trained = WithLoss(network, change(network))
    torch.manual_seed(1)
    with compiling(budget):
        trained(inputs).backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in network.parameters()
    ]
    return torch.cat([gradient.flatten() for gradient in gradients]), dict(network.named_buffers())


def heading(arguments: dict) -> tuple[str, str]:
    return "What a repeated forward pass changes", "The first step, in float32, with the random numbers of the baseline"


def sections(call: dict, _: str) -> Iterator[str]:
    """A row for each method; those of one function with several budgets are one row."""
    networks = call["items"]
    rows = defaultdict[str, list[dict]](list)
    for row in without_reasons(frame.rows_of(call)):
        rows[OURS if row["method"].startswith(OURS) else row["method"]].append(row)
    cells = []
    for method, method_rows in rows.items():
        worst = [[row["deviation"] for row in method_rows if row["network"] == name] for name in networks]
        moved = max((row["moved"] for row in method_rows if "moved" in row), default=0)
        equal = f"{sum(row['identical'] for row in method_rows)} of {len(method_rows)}"
        cells.append([f"`{method}`", *map(_text, worst), f"{moved}" if moved else "", equal])
    yield (
        "Largest error of a gradient, relative to the largest; how often running statistics move; steps bitwise "
        f"identical to the baseline's, with all buffers. `{OURS}` within {len(SHARES)} budgets, "
        f"{min(SHARES)} to {max(SHARES)} of the baseline's peak."
    )
    yield table(["method", *networks, "moves", "identical"], cells)


def _text(deviations: list[float | None]) -> str:
    """The largest of a network; empty if there is none, and None is not a number."""
    numbers = [number for number in deviations if number is not None]
    if len(numbers) < len(deviations):
        return "NaN"
    return f"{max(numbers):.0e}" if any(numbers) else "0" if numbers else ""


BENCHMARK = frame.Benchmark(
    "repetition", frame.Arguments, lambda _: {name: (name,) for name in NETWORKS}, measure, heading, sections
)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
