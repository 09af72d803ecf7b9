"""Gradients of convolutions that PyTorch computes wrongly on a CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keepless.saved import kept_bytes
from models.cpu_gradients import FromCopies, correct_gradients, wrong_gradients


@pytest.mark.parametrize("channels, groups, kernel, bias", [(64, 64, 3, False), (64, 16, 3, True), (64, 64, 5, False)])
def test_gradients_equal_float64_s_and_nothing_more_is_kept(channels, groups, kernel, bias):
    """PyTorch's own gradients of the weights are off by more than themselves on some processors."""
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel - 1, dilation=2, groups=groups, bias=bias)
    network = nn.Sequential(conv, nn.BatchNorm2d(channels))
    exact, before = copy.deepcopy(network).double(), copy.deepcopy(network)
    for layer in (network, before):
        layer.to(memory_format=torch.channels_last)
    assert correct_gradients(network, "bfloat16") == [] and [*network.state_dict()] == [*before.state_dict()]
    image = torch.randn(2, channels, 30, 30).contiguous(memory_format=torch.channels_last).requires_grad_()
    double, dy = image.detach().double().requires_grad_(), torch.randn(2, channels, 30, 30)
    with torch.autocast("cpu", torch.bfloat16):
        y, kept = network(image), [kept_bytes(module, lambda e=module: e(image)) for module in (network, before)]
    assert kept[0] == kept[1] and y.is_contiguous(memory_format=torch.channels_last)
    y.float().mul(dy).sum().backward()
    exact(double).mul(dy.double()).sum().backward()
    gradients = [image.grad, *(parameter.grad for parameter in network.parameters())]
    for gradient, exact_gradient in zip(gradients, [double.grad, *(p.grad for p in exact.parameters())], strict=True):
        if exact_gradient.abs().max() > 1e-6:  # a bias before a norm has none
            assert (gradient - exact_gradient).abs().max() / exact_gradient.abs().max() < 0.03


def test_other_kinds_of_convolutions_are_named():
    class Own(nn.Conv2d):
        pass

    kinds = [nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=4), Own(4, 4, 3, dilation=2, groups=2)]
    network = nn.Sequential(*kinds, nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, groups=4))
    assert correct_gradients(network, "bfloat16") == ["0", "1"]


def test_strided_1x1_convolutions_of_few_channels_train_in_float32():
    """PyTorch's own backward pass writes outside of its buffers, which kills the process now or later."""
    network = nn.Sequential(nn.Conv2d(3, 16, 1, stride=2), nn.Conv2d(16, 4, 1, stride=2), nn.Conv2d(4, 4, 1))
    assert wrong_gradients(network, "float32") == ["0"] and correct_gradients(network, "float32") == []
    assert isinstance(network[0], FromCopies) and not isinstance(network[1], FromCopies)
    exact = copy.deepcopy(network).double()
    for _ in range(30):  # without the correction, some of these kill the process
        image = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
        network.zero_grad()
        network.to(memory_format=torch.channels_last)(image).square().sum().backward()
    exact(image.double()).square().sum().backward()
    for ours, right in zip(network.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-5, atol=1e-5)
        assert ours.grad.stride() == ours.stride()  # as DDP's buckets expect


def test_a_checkpointed_block_reads_what_it_saved_once():
    """`torch.utils.checkpoint` refuses to unpack a tensor twice."""
    network = nn.Sequential(nn.Conv2d(3, 16, 1, stride=2), nn.ReLU())
    assert correct_gradients(network, "float32") == []
    checkpoint(network, torch.randn(2, 3, 64, 64), use_reentrant=False).sum().backward()
    assert network[0].weight.grad.abs().max() > 0
