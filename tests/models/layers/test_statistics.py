"""Recomputed running statistics. For several processes see tests/engine/test_distributed.py."""

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from models.layers import InPlaceABN, renew_statistics


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
def test_renewed_statistics_are_the_average_of_the_given_minibatches(norm):
    """As from PyTorch's update_bn, but without the dropout that it leaves on."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.9), norm(4)).train()
    minibatches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    renew_statistics(network, minibatches)
    with torch.no_grad():
        outputs = [network[0](images).transpose(0, 1).flatten(1) for images in minibatches]
    torch.testing.assert_close(network[2].running_mean, sum(y.mean(dim=1) for y in outputs) / 3)
    torch.testing.assert_close(network[2].running_var, sum(y.var(dim=1) for y in outputs) / 3)
    assert network[2].momentum == 0.1 and not network.training


def test_a_loader_of_images_and_labels_needs_a_forward():
    network = nn.Sequential(InPlaceABN(3), FrozenBatchNorm2d(3)).train()
    frozen = network[1].running_mean.clone()
    loader = [(torch.randn(2, 3, 8, 8), torch.zeros(2)) for _ in range(3)]
    renew_statistics(network, loader, forward=lambda minibatch: network(minibatch[0]))
    torch.testing.assert_close(network[0].running_mean, sum(images.mean((0, 2, 3)) for images, _ in loader) / 3)
    assert torch.equal(network[1].running_mean, frozen)
