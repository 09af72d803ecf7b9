"""Recomputed running statistics. For several processes see tests/engine/test_distributed.py."""

import math

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from models.layers import InPlaceABN, renew_statistics


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
@pytest.mark.parametrize("labelled", [False, True])
def test_renewed_statistics_are_the_average_of_the_given_minibatches(norm, labelled):
    """As from PyTorch's update_bn, but without the dropout that it leaves on; other minibatches need a `forward`."""
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


def test_an_error_in_a_minibatch_leaves_the_momentum():
    layer = InPlaceABN(4)
    with pytest.raises(ValueError, match=r"expected \(N, 4"):
        renew_statistics(layer, [torch.randn(2, 4, 8, 8), torch.randn(2, 5, 8, 8)])
    assert layer.momentum == 0.1
