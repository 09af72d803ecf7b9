"""Budgets on a CUDA device, beside the same on a CPU."""

import copy

import pytest
import torch
from torch import Tensor, nn

from keepless import recompute_activations
from keepless.recompute.costs import peak_bytes
from tests.cuda import NEEDS_CUDA
from tests.keepless.budget.ahead import Ahead

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SECOND = pytest.param("cuda:1", marks=[*NEEDS_CUDA, NEEDS_TWO])


def step(network: nn.Module, x: Tensor) -> None:
    network(x).square().mean().backward()


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA), SECOND])
def test_every_step_is_within_the_budget_and_exact(device, with_example):
    """From the first on. Convolutions' workspace on a device is not planned, so that a step may take 5 % more."""
    torch.manual_seed(0)
    blocks = [(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()) for _ in range(6)]
    layers = [nn.Conv2d(3, 32, 1), *(layer for block in blocks for layer in block), nn.AdaptiveAvgPool2d(1)]
    plain = nn.Sequential(*layers).to(device)
    x = torch.randn(4 if device == "cpu" else 32, 3, 32, 32, device=device)
    within = copy.deepcopy(plain)
    step(plain, x)
    budget = int(0.5 * peak_bytes(lambda: step(plain, x), device))
    plans = Ahead.of(recompute_activations(within, budget=budget, example=x if with_example else None))
    for _ in range(4):
        assert plans.peak(within, x) <= 1.05 * budget
    for one in (plain, within):
        one.zero_grad()
        step(one, x)
    for ours, theirs in zip(within.parameters(), plain.parameters(), strict=True):
        if device == "cpu":
            assert torch.equal(ours.grad, theirs.grad)
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
