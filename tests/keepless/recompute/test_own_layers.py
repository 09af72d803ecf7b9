"""Layers of ours within a budget: they run again, equal to the bit, and their running statistics move once."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from keepless.norms.bn_act import norm_and_activation
from keepless.recompute.costs import peak_bytes
from keepless.recompute.rehearsal import traced_step
from keepless.recompute.search import Choice
from keepless.recompute.simulation import plain_peak, simulate
from keepless.recompute.step import Kind
from tests.keepless.recompute.ahead import Ahead, step

CASES = {
    "I": (InPlaceABN, {"variant": "I"}),
    "II": (InPlaceABN, {"variant": "II", "learn_scale": False}),
    "x": (CheckpointedABN, {"store": "x"}),
    "x_hat": (CheckpointedABN, {"store": "x_hat", "activation": "relu"}),
    "standard": (ABN, {}),
}


class Residual(nn.Module):
    def __init__(self, cls: type[ABN], **options):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), cls(8, **options)
        self.second, self.out = nn.Conv2d(8, 8, 3, padding=1, bias=False), cls(8, momentum=None, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.second(F.dropout(self.norm(self.first(x)), 0.1)))


def resnet(cls: type[ABN], blocks: int, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Residual(cls, **options) for _ in range(blocks)))


def images(crops: int = 4) -> Tensor:
    return torch.randn(crops, 3, 32, 32) * torch.ones(1)  # in memory of its own


@pytest.mark.parametrize("variant", ["I", "II"])
def test_in_place_layers_reach_half_of_the_plain_peak(variant):
    reference, x = resnet(InPlaceABN, 6, variant=variant), images()
    within = recompute_activations(copy.deepcopy(reference), budget=0.5)
    plans, warm = Ahead.of(within), copy.deepcopy(reference)
    step(warm, x)
    plain = peak_bytes(lambda: step(warm, x), "cpu")
    for _ in range(3):
        found: list[Tensor] = []
        assert plans.peak(within, x, lambda: found.extend(step(within, x))) <= 1.03 * 0.5 * plain  # noqa: B023
        assert all(map(torch.equal, found, step(reference, x)))


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_any_plan_is_exact_and_takes_the_simulated_bytes(name, training, backend):
    cls, options = CASES[name]
    network, x = resnet(cls, 2, backend=backend, **options).train(training), images()
    step(network, x)
    traced, _ = traced_step(network, (x,), {})
    is_counted = cls is not ABN and backend == "eager"  # kernels and PyTorch's own norm take more bytes than are known
    if is_counted:
        assert plain_peak(traced) == pytest.approx(peak_bytes(lambda: step(network, x), "cpu"), rel=0.03)
    for seed in range(3):
        draws = random.Random(seed)
        kept = [one.kind == Kind.KEPT or (one.kind == Kind.FREE and draws.random() < 0.4) for one in traced.values]
        plan, reference = Choice(0, 0.0, tuple(kept)).plan(traced), copy.deepcopy(network)
        assert all(map(torch.equal, step(network, x, plan), step(reference, x)))
        if is_counted:
            measured = peak_bytes(lambda: step(network, x, plan), "cpu")  # noqa: B023
            assert simulate(traced, kept).peak == pytest.approx(measured, rel=0.03)


def test_layers_that_overwrite_their_input_are_not_repeated():
    for overwrites in (True, False):
        network = resnet(InPlaceABN, 1, overwrite_input=overwrites)
        traced, _ = traced_step(network, (images(1),), {})
        assert (norm_and_activation in [function for function, *_ in traced.calls]) is not overwrites
