"""Prepared networks and functorch's transforms, whose wrapped tensors hide what autograd saves."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import recompute_activations

IMAGES = torch.linspace(-1, 1, 3 * 3 * 8 * 8, dtype=torch.float64).sin().view(3, 3, 8, 8)


class KernelPerImage(nn.Module):
    """Predicts a kernel for each image. `overwrites`: inside the transform, what a concatenation was made of."""

    def __init__(self, overwrites: bool):
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4 * 8 * 9)
        self.end, self.overwrites = nn.Conv2d(4, 2, 1), overwrites

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        both = torch.cat([h, F.silu(h)], 1)
        kernels = self.kernels(h.mean((2, 3))).view(-1, 4, 8, 3, 3)
        y = torch.vmap(lambda h, w: F.silu(F.conv2d(F.relu(h * 2)[None], w, padding=1))[0])(both, kernels)
        if self.overwrites:
            torch.vmap(lambda part: part.mul_(2))(y)
        return self.end(F.gelu(y))


def gradients(network: nn.Module, forward=None) -> list[Tensor]:
    return list(torch.autograd.grad((forward or network)(IMAGES).square().mean(), list(network.parameters())))


@pytest.mark.filterwarnings("ignore:no plan keeps")
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("budget", [None, 1.0, "1KiB"])
def test_inside_vmap_nothing_is_followed(budget, overwrites):
    torch.manual_seed(0)
    plain = KernelPerImage(overwrites).double()
    prepared = recompute_activations(copy.deepcopy(plain), budget=budget)
    expected = gradients(plain)
    for _ in range(4):
        for ours, theirs in zip(gradients(prepared), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_network_inside_vmap_needs_no_plan():
    network = recompute_activations(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 1)), budget=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            torch.vmap(network)(IMAGES.float()).sum().backward()
