"""`checking_repetitions(recomputed=True)`: each recomputed tensor is compared with the one PyTorch would have read."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import checking_repetitions, recompute_activations


def steps(network: nn.Module, x: Tensor, count: int = 3) -> None:
    for _ in range(count):
        with checking_repetitions(recomputed=True):
            loss = network(x).square().mean()
        loss.backward()


@pytest.mark.filterwarnings("ignore:no plan keeps")
@pytest.mark.parametrize("budget", [None, "1KiB"])
def test_what_is_recomputed_is_equal(budget):
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.GELU()]
    network = nn.Sequential(*layers, nn.Conv2d(8, 8, 1), nn.Dropout(0.3), nn.SiLU(), nn.Conv2d(8, 4, 1))
    steps(recompute_activations(network, budget=budget), torch.randn(2, 3, 8, 8))


class Unseen(nn.Module):
    """Code in C changes what the recipe of a GELU reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.writes = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.last(F.gelu(y))
        if self.writes:
            ctypes.memset(y.data_ptr(), 0, y.nbytes)
        return z


@pytest.mark.parametrize("before", [0, 2])
def test_a_tensor_that_differs_is_refused_by_the_function_that_recomputes_it(before):
    network = recompute_activations(Unseen())
    steps(network, torch.randn(2, 3, 8, 8), before)
    network.writes = True
    with pytest.raises(RuntimeError, match="gelu has recomputed a tensor of shape .* that differs"):
        steps(network, torch.randn(2, 3, 8, 8))
