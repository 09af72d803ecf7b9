"""DenseNet: torchvision's function, a dense module by hand, the released names, dilation, and the bytes it keeps."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from models.bodies import DenseNet, densenet264
from models.bodies.densenet import DenseModule
from models.layers import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from scripts.bench.measuring import saved_for_backward
from tests.bodies import small_densenet, trained

STRUCTURES = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


def parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def test_names_and_shapes_of_the_release():
    with torch.device("meta"):
        network = densenet264(classes=1000)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert [name for name in shapes if name.startswith("mod1.")] == [
        *("mod1.conv1.weight", "mod1.bn1.weight", "mod1.bn1.bias", "mod1.conv2.weight"),
        *("mod1.bn2.weight", "mod1.bn2.bias", "mod1.conv3.weight"),
    ]
    assert shapes["mod2.convs1.0.bn.weight"] == (64,)
    assert shapes["mod2.convs1.5.conv.weight"] == (128, 64 + 5 * 32, 1, 1)
    assert shapes["mod4.convs3.63.conv.weight"] == (32, 128, 3, 3)
    assert shapes["mod5.convs3.47.bn.bias"] == (128,)
    assert shapes["tra2.bn.weight"] == (256,) and shapes["tra2.conv.weight"] == (128, 256, 1, 1)
    assert shapes["tra4.conv.weight"] == (1152, 2304, 1, 1)
    assert shapes["bn_out.weight"] == (2688,) and shapes["classifier.fc.weight"] == (1000, 2688)
    assert not any(name.startswith(("tra1", "tra5", "mod4.convs1.64")) for name in shapes)


@pytest.mark.parametrize("depth", STRUCTURES)
def test_the_other_depths_have_torchvision_s_parameters_behind_the_stem(depth):
    with torch.device("meta"):
        ours = DenseNet(structure=STRUCTURES[depth], classes=1000)
        theirs = getattr(torchvision.models, f"densenet{depth}")()
    stem = parameters(theirs.features.conv0, theirs.features.norm0)
    assert parameters(ours) - parameters(ours.mod1) == parameters(theirs) - stem


def released_name(name: str) -> str | None:
    """torchvision's name -> ours; None for its stem, which has another convolution and one more norm."""
    _, part, *rest = name.split(".")
    if name.startswith("classifier."):
        return f"classifier.fc.{part}"
    if part.startswith("denseblock"):
        layer, module, kind = rest
        convs = "convs1" if module.endswith("1") else "convs3"
        return f"mod{int(part[-1]) + 1}.{convs}.{int(layer[10:]) - 1}.{'bn' if 'norm' in module else 'conv'}.{kind}"
    if part.startswith("transition"):
        return f"tra{int(part[-1]) + 1}.{'bn' if rest[0] == 'norm' else 'conv'}.{rest[1]}"
    return f"bn_out.{rest[0]}" if part == "norm5" else None


def test_behind_the_stem_it_is_torchvision_s_network():
    """With relu, in eval and training mode: transitions pool before their convolution, which changes only rounding."""
    torch.manual_seed(0)
    theirs = trained(torchvision.models.DenseNet(4, (2, 1, 3, 2), num_init_features=8, num_classes=5))
    ours = small_densenet(partial(ABN, activation="relu"), classes=5).double().eval()
    state = {released_name(name): tensor for name, tensor in theirs.state_dict().items()}
    del state[None]
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert {name.split(".")[0] for name in missing} == {"mod1"} and not unexpected
    ours.mod1 = theirs.features[:4]
    images = torch.randn(2, 3, 96, 64, dtype=torch.float64)
    for training in (False, True):
        logits, expected = ours.train(training)(images), theirs.train(training)(images)
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for name, tensor in theirs.state_dict().items():
        if released_name(name):
            torch.testing.assert_close(ours.state_dict()[released_name(name)], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("norm_act", [ABN, CheckpointedABN, InPlaceABN, partial(InPlaceABN, overwrite_input=True)])
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


def test_where_it_pools_and_dilates():
    def pools(network):
        return [name for name, m in network.named_modules() if isinstance(m, nn.AvgPool2d)]

    with torch.device("meta"):
        strided, dilated = densenet264(), densenet264(output_stride=8)
    assert pools(strided) == ["tra2.pool", "tra3.pool", "tra4.pool"] and pools(dilated) == ["tra2.pool"]
    assert strided.state_dict().keys() == dilated.state_dict().keys()
    for name, dilation in (("mod3", 1), ("mod4", 2), ("mod5", 4)):
        for layer in getattr(dilated, name).convs3:
            assert layer.conv.dilation == layer.conv.padding == (dilation, dilation)


@pytest.mark.parametrize("dilation", [2, 4])
def test_a_dilated_module_has_the_features_of_the_strided_one_in_between(dilation):
    """The whole network's features differ, because the pooling before a dilated module is left out."""
    torch.manual_seed(0)
    plain = trained(DenseModule(6, 3, growth=4, norm_act=ABN))
    dilated = DenseModule(6, 3, growth=4, norm_act=ABN, dilation=dilation).double().eval()
    dilated.load_state_dict(plain.state_dict())
    x = torch.randn(1, 6, 13, 10, dtype=torch.float64)
    with torch.no_grad():
        fine, coarse = dilated(x), plain(x[:, :, ::dilation, ::dilation])
    torch.testing.assert_close(fine[:, :, ::dilation, ::dilation], coarse, rtol=1e-11, atol=1e-11)
