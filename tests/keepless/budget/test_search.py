"""How long the search takes, in simulations: planning 250 calls may take 3 s of a core, and 1,000 calls 10 s."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepless.recompute.rehearsal import rehearsed_step
from keepless.recompute.search import frontier, segmented
from keepless.recompute.simulation import Simulation, plain_peak, simulate

CHANNELS = 8


def layers(calls: int) -> nn.Sequential:
    """Convolution, norm and activation, again and again."""
    parts = [[nn.Conv2d(CHANNELS, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.SiLU()] for _ in range(calls // 3)]
    return nn.Sequential(*(module for part in parts for module in part))


@pytest.fixture
def simulations(monkeypatch) -> list[int]:
    """How many calls each simulated step has."""
    found, run = [], Simulation.run

    def counted(self, kept):
        found.append(len(self.step.calls))
        return run(self, kept)

    monkeypatch.setattr(Simulation, "run", counted)
    return found


@pytest.mark.parametrize("calls", [60, pytest.param(999, marks=pytest.mark.slow)])
def test_a_search_takes_few_simulations(simulations, calls):
    x = torch.randn(2, CHANNELS, *(2 * [2 * calls // 3 + 8]), device="meta")
    step = rehearsed_step(layers(calls).to("meta"), (x,), {}, None)
    plain = plain_peak(step)
    for limit in (plain, 2 * plain):  # at or above the plain peak
        frontier(step, limit)
    assert simulations == [calls, calls]
    found = frontier(step, plain // 2)
    assert min(choice.peak for choice in found) <= plain // 2
    assert len(simulations) < 20 * calls


class Joined(nn.Module):
    """Convolutions, instance norms and activations at two resolutions, as in a U-Net: many choices are dead ends."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = self.block(3, 8), self.block(8, 16), self.block(24, 8)

    def block(self, inputs: int, outputs: int) -> nn.Sequential:
        widths = [inputs, outputs, outputs]
        parts = [
            [nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.1, True)] for a, b in pairwise(widths)
        ]
        return nn.Sequential(*(module for part in parts for module in part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        return self.up(torch.cat([F.interpolate(self.low(F.max_pool2d(x, 2)), scale_factor=2), x], 1))


def test_a_larger_budget_is_met_wherever_a_smaller_one_is_and_the_least_is_the_same():
    step = rehearsed_step(Joined().to("meta"), (torch.randn(2, 3, 32, 32, device="meta"),), {}, None)
    plain, least = plain_peak(step), None
    for share in range(30, 100, 5):
        limit = share * plain // 100
        peak = min(choice.peak for choice in frontier(step, limit))
        if least is None or least > limit:
            assert peak > limit and least in (None, peak)
            least = peak
        else:
            assert peak <= limit
    assert least < 0.8 * plain


def test_layers_of_one_size_are_cut_into_segments():
    """Of n layers, 2 sqrt(n) results need to be there at once."""
    network = nn.Sequential(*(module for _ in range(200) for module in (nn.Linear(8, 8), nn.GELU())))
    step = rehearsed_step(network.to("meta"), (torch.randn(8, 8, device="meta"),), {}, None)
    assert min(simulate(step, kept).peak for kept in segmented(step)) < 3 * 400**0.5 * 8 * 8 * 4
