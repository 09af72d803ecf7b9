"""Recomputed running statistics. test_synchronisation.py has several processes."""

import math

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from keepless import InPlaceABN, renew_statistics


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
@pytest.mark.parametrize("labelled", [False, True])
def test_renewed_statistics_are_the_average_of_the_given_minibatches(norm, labelled):
    """PyTorch's update_bn gives the same, but leaves dropout on; other minibatches need a `forward`."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.9), norm(4), FrozenBatchNorm2d(4)).train()
    frozen, minibatches = network[3].running_mean.clone(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    if labelled:
        renew_statistics(network, [(images, 0) for images in minibatches], forward=lambda batch: network(batch[0]))
    else:
        renew_statistics(network, minibatches)
    with torch.no_grad():
        outputs = [network[0](images).transpose(0, 1).flatten(1) for images in minibatches]
    torch.testing.assert_close(network[2].running_mean, sum(y.mean(dim=1) for y in outputs) / 3)
    torch.testing.assert_close(network[2].running_var, sum(y.var(dim=1) for y in outputs) / 3)
    assert network[2].momentum == 0.1 and not network.training and torch.equal(network[3].running_mean, frozen)


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
def test_statistics_that_are_not_numbers_are_forgotten(norm):
    layer, images = norm(4), torch.randn(2, 4, 8, 8)
    layer.running_mean.fill_(math.nan), layer.running_var.fill_(math.inf)
    renew_statistics(layer, [images])
    torch.testing.assert_close(layer.running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, images.var((0, 2, 3)))


class CalledAsItLikes(nn.Module):
    """One norm twice, one in every second minibatch, one in training alone; and one whose first minibatch is empty."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.shared, self.odd, self.unused, self.late = (norm(4) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.shared(x) + self.shared(x + 10)
        y = y + self.odd(x) if self.calls % 2 == 0 else y
        self.late(x[: self.calls - 1])
        return self.unused(y) if self.training else y


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
def test_statistics_are_averages_over_the_calls_of_each_norm(norm):
    network, minibatches = CalledAsItLikes(norm), [torch.randn(4, 4, 8, 8) for _ in range(4)]
    network.unused.running_var.fill_(3)
    network.odd.num_batches_tracked.fill_(100)
    renew_statistics(network, minibatches)
    means = torch.stack([images.mean((0, 2, 3)) for images in minibatches])
    variances = torch.stack([images.var((0, 2, 3)) for images in minibatches])
    torch.testing.assert_close(network.shared.running_mean, means.mean(0) + 5)
    torch.testing.assert_close(network.odd.running_var, variances[1::2].mean(0))
    late = torch.stack([minibatches[number][:number].mean((0, 2, 3)) for number in (1, 2, 3)])
    torch.testing.assert_close(network.late.running_mean, late.mean(0))
    assert network.unused.running_var.eq(3).all() and network.odd.num_batches_tracked == 2


def test_an_empty_call_after_the_first_one_does_not_reset_the_count():
    layer = InPlaceABN(4)
    renew_statistics(layer, [torch.randn(2, 4, 8, 8), torch.randn(0, 4, 8, 8), torch.randn(2, 4, 8, 8)])
    assert layer.num_batches_tracked == 2


def test_no_minibatch_is_an_error():
    used_up = iter(())
    with pytest.raises(ValueError, match="got no minibatch, so all statistics are old"):
        renew_statistics(nn.BatchNorm1d(3), used_up)


def test_an_error_in_a_minibatch_leaves_the_momentum():
    layer = InPlaceABN(4)
    with pytest.raises(ValueError, match=r"expected \(N, 4"):
        renew_statistics(layer, [torch.randn(2, 4, 8, 8), torch.randn(2, 5, 8, 8)])
    assert layer.momentum == 0.1
