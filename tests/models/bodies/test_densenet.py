"""DenseNet: a dense module by hand, and the bytes that it keeps."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepless import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from models.bodies.densenet import DenseModule
from tests.bodies import kept_maps


@pytest.mark.parametrize(
    "norm_act, dilation",
    [(ABN, 1), (CheckpointedABN, 2), (InPlaceABN, 2), (partial(InPlaceABN, overwrite_input=True), 1)],
)
def test_a_dense_module_is_its_equation(norm_act, dilation):
    torch.manual_seed(0)
    module = DenseModule(3, 3, growth=2, norm_act=norm_act, dilation=dilation).double()
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.2, 1)
    recompute_activations(module, checkpointed_only=True)
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)

    def activated(x, norm):
        return F.leaky_relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True), 0.01)

    expected = x
    for convs1, convs3 in zip(module.convs1, module.convs3, strict=True):
        squeezed = F.conv2d(activated(expected, convs1.bn), convs1.conv.weight)
        grown = F.conv2d(activated(squeezed, convs3.bn), convs3.conv.weight, padding=dilation, dilation=dilation)
        expected = torch.cat([expected, grown], dim=1)
    y = module(x)
    assert y.shape == (2, 3 + 3 * 2, 5, 6) and module.out_channels == 9
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    dy, sources = torch.randn_like(y), [x, *module.parameters()]
    gradients, expected_gradients = torch.autograd.grad(y, sources, dy), torch.autograd.grad(expected, sources, dy)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm_act, copies", [(ABN, 2), (CheckpointedABN, 1), (InPlaceABN, 1)])
def test_a_dense_module_keeps_its_concatenations_once_or_twice(norm_act, copies):
    """Layer j concatenates C + j g channels and squeezes them to 4g. The module's input and output are not kept."""
    module = recompute_activations(DenseModule(8, 5, growth=4, norm_act=norm_act), checkpointed_only=True)
    kept = kept_maps(module, torch.randn(2, 8, 8, 8, requires_grad=True))
    channels = sum(8 + j * 4 + 4 * 4 for j in range(5))
    assert sum(kept.values()) == copies * channels * 2 * 8 * 8 * 4
