"""DenseNet: its parameters, a dense module by hand, and the bytes that it keeps."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from models.bodies import DenseNet
from models.bodies.densenet import DenseModule
from models.layers import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from scripts.bench.measuring import saved_for_backward

STRUCTURES = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


def parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.parametrize("depth", STRUCTURES)
def test_the_other_depths_have_torchvision_s_parameters_behind_the_stem(depth):
    with torch.device("meta"):
        ours = DenseNet(structure=STRUCTURES[depth], classes=1000)
        theirs = getattr(torchvision.models, f"densenet{depth}")()
    stem = parameters(theirs.features.conv0, theirs.features.norm0)
    assert parameters(ours) - parameters(ours.mod1) == parameters(theirs) - stem


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
    ours, theirs = torch.autograd.grad(y, sources, dy), torch.autograd.grad(expected, sources, dy)
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm_act, copies", [(ABN, 2), (CheckpointedABN, 1), (InPlaceABN, 1)])
def test_a_dense_module_keeps_its_concatenations_once_or_twice(norm_act, copies):
    """Layer j concatenates C + j g channels and squeezes them to 4g. The module's input and output are not kept."""
    in_channels, layers, growth = 8, 5, 4
    module = recompute_activations(
        DenseModule(in_channels, layers, growth=growth, norm_act=norm_act), checkpointed_only=True
    )
    x = torch.randn(2, in_channels, 8, 8, requires_grad=True)
    _, saved = saved_for_backward(lambda: module(x))
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    maps = [t for t in saved if t.dim() == 4 and t.untyped_storage()._cdata not in weights]
    channels = sum(in_channels + j * growth + 4 * growth for j in range(layers))
    assert sum(t.untyped_storage().nbytes() for t in maps) == copies * channels * 2 * 8 * 8 * 4
