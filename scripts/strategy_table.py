"""What each strategy of the paper's Figure 2 keeps and recomputes, measured on a BN + ACT + CONV block:

    python -m scripts.strategy_table

prints the table of docs/memory.md. Every cell but the first is observed: the buffers are recognised by their values
among what autograd keeps, the recomputed operations among the operators that the backward pass calls.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.memory import saved_for_backward
from models.layers import ABN, CheckpointedABN, InPlaceABN, recompute_activations

STRATEGIES = {
    "std": ("a", "standard", ABN),
    "checkpoint": ("b", "checkpointing", partial(CheckpointedABN, store="x")),
    "checkpoint_xhat": ("c", "checkpointing (proposed)", partial(CheckpointedABN, store="x_hat")),
    "inplace_1": ("d", "in-place ABN I", partial(InPlaceABN, variant="I")),
    "inplace": ("e", "in-place ABN II", InPlaceABN),
}
CHANNELS, SLOPE = 16, 0.01


@dataclass
class Row:
    norm: str
    buffers: list[str]  # with a value per pixel: x, x_hat, z
    statistics: list[str]  # with a value per channel: mean, sigma
    recomputed: list[str]  # operations in the backward pass that the standard one does not need
    activation_bytes: int  # of the buffers
    channel_bytes: int  # of everything else but parameters


def measure(norm: str) -> Row:
    """Run BN + ACT + CONV forward and backward once, on the reference backend."""
    torch.manual_seed(0)
    layer = STRATEGIES[norm][2](CHANNELS, activation_param=SLOPE, backend="eager")
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.uniform_(layer.bias, -0.5, 0.5)
    block = recompute_activations(nn.Sequential(layer, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)))
    x = torch.randn(4, CHANNELS, 8, 8, requires_grad=True) * 2 + 1
    output, saved = saved_for_backward(lambda: block(x))
    parameters = {p.untyped_storage()._cdata for p in block.parameters()}
    saved = [tensor for tensor in saved if tensor.untyped_storage()._cdata not in parameters]
    names = [_name(tensor, x, layer) for tensor in saved]
    with _Operators(x.shape) as operators:
        output.sum().backward()
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in zip(names, saved, strict=True)}
    buffers = [name for name in ("x", "x_hat", "z") if name in sizes]
    return Row(
        norm=norm,
        buffers=buffers,
        statistics=[name for name in ("mean", "sigma") if name in sizes],
        recomputed=operators.extra(),
        activation_bytes=sum(sizes[name] for name in buffers),
        channel_bytes=sum(size for name, size in sizes.items() if name not in buffers),
    )


def table(rows: list[Row]) -> str:
    """The comparison as Markdown."""
    standard = rows[0].activation_bytes
    lines = [
        "| Figure 2 | strategy | `norm=` | keeps | of it activations | recomputes in the backward pass |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        letter, title, _ = STRATEGIES[row.norm]
        kept = ", ".join(row.buffers + row.statistics)
        share = f"{row.activation_bytes:,} bytes ({row.activation_bytes / standard:.2f})"
        lines.append(f"| {letter} | {title} | {row.norm} | {kept} | {share} | {', '.join(row.recomputed) or '–'} |")
    return "\n".join(lines)


def _name(saved: Tensor, x: Tensor, layer: ABN) -> str:
    """Which quantity of the paper a kept tensor is, recognised by its values."""
    with torch.no_grad():
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        sigma = torch.rsqrt(var + layer.eps)
        x_hat = (x - mean.view(1, -1, 1, 1)) * sigma.view(1, -1, 1, 1)
        y = x_hat * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
        known = {"x": x, "x_hat": x_hat, "z": nn.functional.leaky_relu(y, SLOPE), "mean": mean, "sigma": sigma}
        known |= {"gamma": layer.weight, "running_mean": layer.running_mean, "running_var": layer.running_var}
        for name, tensor in known.items():
            if tensor.shape == saved.shape and torch.allclose(tensor, saved, atol=1e-5):
                return name
    raise AssertionError(f"a kept tensor of shape {tuple(saved.shape)} is none of {', '.join(known)}")


class _Operators(TorchDispatchMode):
    """Records the operators with results of the given shape: forward operations and inverses in a backward pass."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape = shape
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        if torch.is_tensor(first) and first.shape == self.shape:
            self.calls[self._paper_name(function, args)] += 1
        return result

    def extra(self) -> list[str]:
        names = ("BN", "pi", "phi", "phi^-1", "pi^-1")
        return [name for name in names if self.calls[name]]

    @staticmethod
    def _paper_name(function, args) -> str:
        operator = function.overloadpacket.__name__
        if operator == "native_batch_norm":
            mean, var = args[3], args[4]
            trivial = not mean.any() and bool((var == 1).all())
            return "pi" if trivial else "BN"
        if operator in ("leaky_relu", "leaky_relu_"):
            slope = args[1] if len(args) > 1 else 0.01
            return "phi" if slope < 1 else "phi^-1"
        return "pi^-1" if operator in ("sub", "div") else operator


def main() -> None:
    print(table([measure(norm) for norm in STRATEGIES]))


if __name__ == "__main__":
    main()
