"""Every strategy keeps and recomputes what the slides of the paper say; docs/memory.md shows it.

Buffers are recognised by their values among the tensors that autograd keeps, recomputed operations among the operators
that the backward pass calls.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepless import ABN, recompute_activations
from keepless.saved import saved_for_backward
from tests.norms import STRATEGIES

CHANNELS, SLOPE = 16, 0.01
# The slides' "Strategies Comparisons"; they misprint x for x_hat in the proposed checkpointing (section 3.2).
SLIDES = {
    "std": (["x", "z"], ["mean", "sigma"], []),
    "checkpoint": (["x"], ["mean", "sigma"], ["BN", "phi"]),
    "checkpoint_xhat": (["x_hat"], ["sigma"], ["pi", "phi"]),
    "inplace_1": (["z"], ["sigma"], ["phi^-1", "pi^-1"]),
    "inplace": (["z"], ["sigma"], ["phi^-1"]),
}


def test_every_strategy_keeps_and_recomputes_what_the_slides_say():
    for norm, (buffers, statistics, recomputed) in SLIDES.items():
        own = kept_by_block(norm)
        assert (own.buffers, own.statistics, sorted(own.recomputed)) == (buffers, statistics, sorted(recomputed)), norm
        assert own.activation_bytes == len(buffers) * 16384


class Kept(NamedTuple):
    """The buffers that BN + ACT + CONV keeps, and the operations that it repeats."""

    buffers: list[str]  # a value per pixel: x, x_hat, z
    statistics: list[str]  # a value per channel: mean, sigma
    recomputed: list[str]  # operations in the backward pass that the standard one does not need
    activation_bytes: int  # of the buffers


def kept_by_block(norm: str) -> Kept:
    """Run BN + ACT + CONV forward and backward once, on the reference backend."""
    torch.manual_seed(0)
    layer = STRATEGIES[norm](CHANNELS, activation_param=SLOPE, backend="eager")
    gamma, beta = layer.parameters()
    nn.init.uniform_(gamma, 0.5, 1.5)
    nn.init.uniform_(beta, -0.5, 0.5)
    block = nn.Sequential(layer, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False))
    recompute_activations(block, checkpointed_only=True)
    x = torch.randn(4, CHANNELS, 8, 8, requires_grad=True) * 2 + 1
    output, saved = saved_for_backward(lambda: block(x), block.parameters())
    sizes = {_name(tensor, x, layer): tensor.untyped_storage().nbytes() for tensor in saved}
    with _Operators(x.shape) as operators:
        output.sum().backward()
    buffers: list[str] = [name for name in ("x", "x_hat", "z") if name in sizes]
    recomputed = [name for name in ("BN", "pi", "phi", "phi^-1", "pi^-1") if operators.calls[name]]
    statistics: list[str] = [name for name in ("mean", "sigma") if name in sizes]
    return Kept(buffers, statistics, recomputed, sum(sizes[name] for name in buffers))


def _name(saved: Tensor, x: Tensor, layer: ABN) -> str:
    """The paper's name for a kept tensor, recognised by its values."""
    with torch.no_grad():
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        sigma = torch.rsqrt(var + layer.eps)
        gamma, beta = layer.parameters()
        as_images = partial(torch.Tensor.view, size=(1, -1, 1, 1))
        x_hat = (x - as_images(mean)) * as_images(sigma)
        z = F.leaky_relu(x_hat * as_images(gamma) + as_images(beta), SLOPE)
        known = {"x": x, "x_hat": x_hat, "z": z, "mean": mean, "sigma": sigma, "gamma": gamma}
        for name, tensor in {**known, **dict(layer.named_buffers())}.items():
            if tensor.shape == saved.shape and torch.allclose(tensor, saved, atol=1e-5):
                return name
    raise AssertionError(f"a kept tensor of shape {tuple(saved.shape)} is none of {', '.join(known)}")


class _Operators(TorchDispatchMode):
    """Counts operators whose results have the given shape: in a backward pass, recomputed steps and inverses."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape = shape
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        if torch.is_tensor(first) and first.shape == self.shape:
            self.calls[self._paper_name(function.overloadpacket.__name__, args)] += 1
        return result

    @staticmethod
    def _paper_name(operator: str, args: tuple) -> str:
        if operator == "native_batch_norm":
            mean, var = args[3], args[4]
            return "pi" if not mean.any() and bool((var == 1).all()) else "BN"
        if operator in ("leaky_relu", "leaky_relu_"):
            return "phi" if len(args) < 2 or args[1] < 1 else "phi^-1"
        return "pi^-1" if operator in ("sub", "div") else operator
