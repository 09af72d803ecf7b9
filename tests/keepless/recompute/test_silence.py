"""Ordinary networks are trained within a budget without a single warning."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from keepless import recompute_activations


class Network(nn.Module):
    """A linear layer before and behind something that networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.between(F.gelu(self.first(x)))))

    def between(self, x: Tensor) -> Tensor:
        return x


class Averages(Network):
    def between(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.square().mean((0, 1)).sqrt())
        return x / self.scale


class Decorated(Network):
    @torch.no_grad()
    def angles(self, length):
        return torch.arange(length).float()[:, None] * self.scale

    def between(self, x):
        return x * self.angles(x.size(1)).cos()


class Teacher(Network):
    """A part that is run without gradients, in inference mode."""

    def between(self, x):
        with torch.inference_mode():
            target = F.gelu(self.second(x)).mean()
        return x * target.clone()


class Frozen(Network):
    """Freezes its first layer, like detectors."""

    def forward(self, x):
        torch.set_grad_enabled(False)
        x = F.gelu(self.first(x))
        torch.set_grad_enabled(True)
        return self.second(F.gelu(self.second(x)))


class Trained(Network):
    """A gradient that is needed whatever the mode outside."""

    def between(self, x):
        with torch.no_grad(), torch.enable_grad():
            return F.silu(x)


class Quantised(Network):
    """A straight-through estimator."""

    def between(self, x):
        return x + (x.round() - x).detach()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class OwnFunction(Network):
    def between(self, x):
        return Doubled.apply(x)


class Graph(Network):
    def between(self, x):
        return torch.sparse.mm(torch.eye(8).to_sparse(), x.flatten(0, 1)).view_as(x)


class Routed(Network):
    """Reads how many rows an expert has."""

    def between(self, x):
        rows = x.flatten(0, 1)
        chosen = (rows.mean(1) > 0).nonzero()[:, 0]
        return rows.index_add(0, chosen, F.gelu(rows[chosen])).view_as(x)


class Dictionary(Network):
    def forward(self, x):
        return {"out": super().forward(x), "ids": x.argmax(-1)}


def reparametrised(norm) -> nn.Module:
    network = Network()
    norm(network.first)
    return network


NETWORKS = {
    "averages of activations": Averages,
    "angles of positions": Decorated,
    "a teacher": Teacher,
    "frozen first layers": Frozen,
    "gradients switched on": Trained,
    "quantised": Quantised,
    "an own function": OwnFunction,
    "a dictionary": Dictionary,
    "a sparse matrix": Graph,
    "an expert": Routed,
    "spectral norm": lambda: reparametrised(parametrizations.spectral_norm),
    "weight norm": lambda: reparametrised(parametrizations.weight_norm),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("budget", [None, "1GiB"])
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_said_about_ordinary_networks(name, budget):
    network, x = recompute_activations(NETWORKS[name](), budget=budget), torch.randn(2, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):  # rehearsed, recorded, and by a script
            output = network(x)
            (output["out"] if isinstance(output, dict) else output).square().mean().backward()
