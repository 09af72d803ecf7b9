"""BN + ACT + CONV keeps the buffers and repeats the operations of the slides "Strategies Comparisons" of the paper.

Buffers are recognised by their values, operations among the operators of the backward pass, on the reference backend.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepless import recompute_activations
from keepless.saved import saved_for_backward
from tests.bodies import kept_maps
from tests.norms import STRATEGIES

CHANNELS, SLOPE = 16, 0.01
SLIDES = {  # what is kept, and repeated; the slides misprint x for x_hat in the proposed checkpointing (section 3.2)
    "std": ({"x", "z", "mean", "sigma"}, set()),
    "checkpoint": ({"x", "mean", "sigma"}, {"BN", "phi"}),
    "checkpoint_xhat": ({"x_hat", "sigma"}, {"pi", "phi"}),
    "inplace_1": ({"z", "sigma"}, {"phi^-1", "pi^-1"}),
    "inplace": ({"z", "sigma"}, {"phi^-1"}),
}


class Repeated(TorchDispatchMode):
    """Context that notes the paper's names of the operations that run again, or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:
        operator = function.overloadpacket.__name__
        if operator == "native_batch_norm":
            mean, var = args[3], args[4]
            self.names.add("pi" if not mean.any() and bool((var == 1).all()) else "BN")
        elif operator in ("leaky_relu", "leaky_relu_"):
            self.names.add("phi" if len(args) < 2 or args[1] < 1 else "phi^-1")
        elif operator in ("sub", "div") and args[0].dim() == 4:
            self.names.add("pi^-1")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_and_repeats_what_the_slides_say(strategy):
    torch.manual_seed(0)
    layer = STRATEGIES[strategy](CHANNELS, activation_param=SLOPE, backend="eager")
    gamma, beta = layer.parameters()
    nn.init.uniform_(gamma, 0.5, 1.5)
    nn.init.uniform_(beta, -0.5, 0.5)
    block = nn.Sequential(layer, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False))
    recompute_activations(block, checkpointed_only=True)
    x = torch.randn(4, CHANNELS, 8, 8, requires_grad=True) * 2 + 1
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    x_hat, y = (F.batch_norm(x, None, None, *scale, training=True, eps=layer.eps) for scale in ((), (gamma, beta)))
    sigma = torch.rsqrt(var + layer.eps)
    expected = {"x": x, "x_hat": x_hat, "z": F.leaky_relu(y, SLOPE), "mean": mean, "sigma": sigma}
    output, saved = saved_for_backward(lambda: block(x))
    with Repeated() as repeated:
        output.sum().backward()
    kept = {
        name
        for name, value in expected.items()
        if any(tensor.shape == value.shape and torch.allclose(tensor, value, atol=1e-5) for tensor in saved)
    }
    assert (kept, repeated.names) == SLIDES[strategy]
    assert [*kept_maps(block, x).values()] == [x.nbytes] * len(kept & {"x", "x_hat", "z"})
