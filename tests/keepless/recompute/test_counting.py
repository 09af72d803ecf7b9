"""A counted step has the bytes that PyTorch's profiler measures, and a plan stays within its budget."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from keepless import recompute_activations
from keepless.recompute.costs import peak_bytes
from keepless.recompute.rehearsal import counted_step, rehearsed_step
from keepless.recompute.simulation import plain_peak


class Residual(nn.Module):
    """Activations write over the results of instance norms, which are views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.act = nn.InstanceNorm2d(16), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        return self.act(x + self.act(self.norm(self.second(y))))


class Transposed(nn.Module):
    """Three layers read one tensor that is not contiguous, and each saves a copy. On fake tensors it is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (layer(h) for layer in self.layers)
        return x + q.sigmoid() * k.tanh() * v


class Pyramid(nn.Module):
    """Looks up windows of a pyramid of correlations, as RAFT does."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.update = nn.Conv2d(3, 16, 3, 4, 1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.features(x).flatten(2).chunk(2)
        levels = [torch.matmul(a.transpose(1, 2), b).view(-1, 1, 16, 16)]
        levels.append(F.avg_pool2d(levels[0], 2))
        flow, total = torch.zeros(256, 1, 1, 2), torch.zeros(())
        for _ in range(3):
            found = [F.grid_sample(level, flow, align_corners=True).view(1, 1, 16, 16) for level in levels]
            change = self.update(torch.cat(found, 1))
            flow, total = flow + change.detach().view(2, 256).t().view(256, 1, 1, 2), total + change.abs().mean()
        return total


def orthogonal() -> nn.Module:
    return nn.Sequential(*(parametrizations.orthogonal(nn.Linear(96, 96)) for _ in range(3)))


NETWORKS = {
    "over views": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual() for _ in range(4))),
        (2, 3, 48, 48),
    ),
    "copies": (lambda: nn.Sequential(*(Transposed() for _ in range(4))), (48, 15, 64)),
    "pyramid": (Pyramid, (2, 3, 64, 64)),
    "orthogonal": (orthogonal, (64, 96)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = make().train()
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return network, torch.randn(shape)


def step(network: nn.Module, x: Tensor) -> None:
    y = network(x)
    (y.square().mean() if y.dim() else y).backward()


@pytest.mark.parametrize("name", ["over views", "copies", "pyramid"])  # a matrix exponential's memory depends on values
def test_the_plain_peak_is_the_measured_one(name):
    network, x = made(name)
    step(network, x)
    measured = peak_bytes(lambda: step(network, x), "cpu")
    for count in (rehearsed_step, counted_step):
        assert plain_peak(count(network, (x,), {})) == pytest.approx(measured, abs=256)


@pytest.mark.parametrize("name, shares", [("over views", (0.8, 0.6)), ("copies", (0.7, 0.5)), ("orthogonal", (1.01,))])
def test_steps_are_within_their_budget_and_nothing_is_said(name, shares):
    for share in shares:
        network, x = made(name)
        step(network, x)
        budget = int(share * peak_bytes(lambda: step(network, x), "cpu"))  # noqa: B023
        recompute_activations(network, budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                step(network, x)
        assert peak_bytes(lambda: step(network, x), "cpu") <= 1.005 * budget  # noqa: B023
