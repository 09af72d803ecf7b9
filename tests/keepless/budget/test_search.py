"""How long the search takes, in simulations: planning 250 calls may take 3 s of a core, and 1,000 calls 10 s."""

import pytest
import torch
from torch import nn

from keepless.budget.search import frontier
from keepless.budget.simulation import Simulation, plain_peak
from keepless.budget.traced_step import rehearsed_step

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
