"""ResNet: torchvision's networks under the released names, where it strides, what dilation changes."""

import re
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from models.bodies import resnet34, resnet50, resnet101
from models.convert import to_inplace
from models.layers import ABN, InPlaceABN
from tests.bodies import small_resnet, small_resnet_basic, trained

RELU = partial(ABN, activation="relu")


def released_name(name: str) -> str:
    """torchvision's name -> ours."""
    name = re.sub(r"^(conv1|bn1)\.", r"mod1.\1.", name)
    name = re.sub(r"^fc\.", "classifier.fc.", name)
    name = name.replace("downsample.0.", "proj_conv.").replace("downsample.1.", "proj_bn.")

    def in_block(match: re.Match) -> str:
        layer, block, rest = int(match[1]), int(match[2]), match[3]
        return f"mod{layer + 1}.block{block + 1}.{rest if rest.startswith('proj') else 'convs.' + rest}"

    return re.sub(r"^layer(\d)\.(\d+)\.(.*)", in_block, name)


@pytest.mark.parametrize("name, build", [("resnet34", resnet34), ("resnet50", resnet50), ("resnet101", resnet101)])
def test_torchvision_s_weights_give_torchvision_s_function(name, build):
    """In eval and in training mode, with the statistics that the latter leaves and the first convolution's gradient."""
    torch.manual_seed(0)
    theirs = trained(getattr(torchvision.models, name)(num_classes=7))
    ours = build(RELU, classes=7).double().eval()
    ours.load_state_dict({released_name(name): tensor for name, tensor in theirs.state_dict().items()}, strict=True)
    images = torch.randn(3, 3, 65, 64, dtype=torch.float64)
    with torch.no_grad():
        logits, expected = ours(images), theirs(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())

    logits, expected = ours.train()(images), theirs.train()(images)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[released_name(name)], tensor, rtol=1e-9, atol=1e-9)
    weights = (ours.mod1.conv1.weight, theirs.conv1.weight)
    pairs = zip((logits, expected), weights, strict=True)
    gradient, reference = (torch.autograd.grad(out.square().mean(), weight)[0] for out, weight in pairs)
    torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-7 * reference.abs().max().item())


def test_names_and_shapes_of_the_release():
    with torch.device("meta"):
        network, basic = resnet50(classes=1000), resnet34()
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert [name for name in shapes if name.startswith("mod1.")] == [
        "mod1.conv1.weight",
        "mod1.bn1.weight",
        "mod1.bn1.bias",
    ]
    assert shapes["mod1.conv1.weight"] == (64, 3, 7, 7)
    assert shapes["mod2.block1.proj_conv.weight"] == (256, 64, 1, 1)
    assert shapes["mod2.block1.proj_bn.bias"] == (256,)
    assert shapes["mod3.block1.convs.conv1.weight"] == (128, 256, 1, 1)
    assert shapes["mod4.block6.convs.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["mod5.block3.convs.bn3.weight"] == (2048,)
    assert shapes["classifier.fc.weight"] == (1000, 2048)
    assert not any("bn_out" in name or "block2.proj" in name for name in shapes)
    assert "mod2.block1.proj_conv.weight" not in basic.state_dict()
    assert "mod3.block1.proj_bn.running_var" in basic.state_dict()


@pytest.mark.parametrize("build, strided", [(resnet50, "conv2"), (resnet34, "conv1")])
def test_the_stride_is_on_the_first_3x3_convolution(build, strided):
    def striding(network):
        return [name for name, m in network.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]

    with torch.device("meta"):
        network, dilated = build(), build(output_stride=8)
    starts = [f"mod{number}.block1.{conv}" for number in (3, 4, 5) for conv in (f"convs.{strided}", "proj_conv")]
    assert striding(network) == ["mod1.conv1", *starts]
    assert striding(dilated) == ["mod1.conv1", *starts[:2]]
    for name, dilation in (("mod3", 1), ("mod4", 2), ("mod5", 4)):
        convs = [m for m in getattr(dilated, name).modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert {conv.dilation for conv in convs} == {conv.padding for conv in convs} == {(dilation, dilation)}


@pytest.mark.parametrize("build, strided", [(small_resnet, "conv2"), (small_resnet_basic, "conv1")])
def test_dilation_changes_one_convolution_per_dilated_stage(build, strided):
    """The release dilates a stage's strided 3x3 convolution too; strided and dilated ones share the centre tap."""
    torch.manual_seed(0)
    network = trained(build())
    dilated = build(output_stride=8).double().eval()
    images = torch.randn(1, 3, 67, 45, dtype=torch.float64)

    def features():
        dilated.load_state_dict(network.state_dict())
        with torch.no_grad():
            return network(images), dilated(images)[:, :, ::4, ::4]

    coarse, fine = features()
    assert (coarse - fine).abs().max() > 1e-3
    for stage in (network.mod4, network.mod5):
        weight = getattr(stage.block1.convs, strided).weight.data
        centre = weight[:, :, 1, 1].clone()
        weight.zero_()[:, :, 1, 1] = centre
    torch.testing.assert_close(*features(), rtol=1e-11, atol=1e-11)


def test_a_conversion_changes_the_activation_after_the_sum_too():
    """It is read from the first norm, so relu becomes the paper's leaky relu everywhere."""
    torch.manual_seed(0)
    relu, leaky = trained(small_resnet(RELU)), trained(small_resnet(InPlaceABN))
    converted = to_inplace(relu, relu_slope=0.01)
    leaky.load_state_dict(converted.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert converted.mod2.block1.activation == ("leaky_relu", 0.01)
    torch.testing.assert_close(converted(images), leaky(images), rtol=0, atol=0)
