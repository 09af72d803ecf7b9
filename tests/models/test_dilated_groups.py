"""Gradients of dilated convolutions with groups in bfloat16 on a CPU."""

import copy

import pytest
import torch
from torch import nn

from models.dilated_groups import run_contiguous


@pytest.mark.parametrize("channels, groups, kernel", [(64, 64, 3), (64, 16, 3), (64, 64, 5)])
def test_their_weights_get_the_gradient_of_float64(channels, groups, kernel):
    """PyTorch's is off by more than itself on some processors, without these hooks."""
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel - 1, dilation=2, groups=groups, bias=False).bfloat16()
    network = nn.Sequential(conv, nn.Identity())
    exact = copy.deepcopy(network).double()
    network.to(memory_format=torch.channels_last)
    run_contiguous(network)
    image = torch.randn(2, channels, 30, 30).bfloat16().contiguous(memory_format=torch.channels_last)
    for each, x in ((network, image), (exact, image.double())):
        y = each(x)
        y.square().sum().backward()
    assert network(image).is_contiguous(memory_format=torch.channels_last)
    error = (conv.weight.grad - exact[0].weight.grad).abs().max() / exact[0].weight.grad.abs().max()
    assert error < 0.02
