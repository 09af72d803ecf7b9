"""All bodies: the published parameter counts and names, output strides, what dilation preserves, every norm."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.bodies import (
    DenseNet,
    ResNet,
    densenet264,
    resnet34,
    resnet50,
    resnet101,
    resnext101,
    resnext152,
    wider_resnet38,
    wider_resnet38_a2,
)
from models.layers import ABN, recompute_activations
from scripts.bench.measuring import saved_for_backward
from scripts.strategy_table import STRATEGIES
from tests.bodies import SMALL_BODIES, small_resnext, small_wider, small_wider_a2, trained

CIFAR_RESNET_32 = partial(ResNet, structure=(5, 5, 5), base_channels=(16, 16), stem_channels=16, stem="cifar")
CIFAR_DENSENET_100 = partial(DenseNet, structure=(16, 16, 16), growth=12, stem_channels=24, stem="cifar")
every_body = pytest.mark.parametrize("name", SMALL_BODIES)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    "build, with_classifier, without, out_channels",
    [
        (resnet34, 21_797_672, 21_284_672, 512),
        (resnet50, 25_557_032, 23_508_032, 2048),
        (resnet101, 44_549_160, 42_500_160, 2048),
        (densenet264, 33_403_880, 30_714_880, 2688),
        (resnext101, 42_902_312, 40_853_312, 2048),
        (partial(resnext101, stem="7x7"), 42_836_008, 40_787_008, 2048),
        (resnext152, 58_159_912, 56_110_912, 2048),
        (wider_resnet38, 109_167_912, 105_070_912, 4096),
        (wider_resnet38_a2, 109_167_912, 105_070_912, 4096),
    ],
)
def test_parameter_counts_and_output_channels_are_the_published_ones(build, with_classifier, without, out_channels):
    with torch.device("meta"):
        assert parameters(build(classes=1000)) == with_classifier
        body = build()
    assert parameters(body) == without
    assert body.out_channels == out_channels


@pytest.mark.parametrize("build, with_10_classes", [(CIFAR_RESNET_32, 466_906), (CIFAR_DENSENET_100, 769_162)])
def test_parameter_counts_of_published_cifar_networks(build, with_10_classes):
    """ResNet-32 with projections (MemCNN), and DenseNet-BC of 100 layers and growth 12 (0.8 million in its paper)."""
    with torch.device("meta"):
        assert parameters(build(classes=10)) == with_10_classes


@pytest.mark.parametrize(
    "build, output_stride, features",
    [
        (resnet34, 32, (2, 512, 2, 3)),
        (resnet101, 8, (2, 2048, 8, 12)),
        (densenet264, 32, (2, 2688, 2, 3)),
        (densenet264, 8, (2, 2688, 8, 12)),
        (resnext101, 32, (2, 2048, 2, 3)),
        (resnext101, 8, (2, 2048, 8, 12)),
        (resnext152, 16, (2, 2048, 4, 6)),
        (wider_resnet38, 32, (2, 4096, 2, 3)),
        (wider_resnet38_a2, 32, (2, 4096, 2, 3)),
        (wider_resnet38_a2, 16, (2, 4096, 4, 6)),
        (wider_resnet38_a2, 8, (2, 4096, 8, 12)),
    ],
)
def test_features_of_the_full_networks_have_the_output_stride(build, output_stride, features):
    with torch.device("meta"):
        body = build(output_stride=output_stride)
        assert body.output_stride == output_stride
        assert body(torch.empty(2, 3, 64, 96)).shape == features


@every_body
def test_sizes_that_do_not_divide_are_rounded_up(name):
    """The number of cells that prediction in windows expects."""
    body = SMALL_BODIES[name]().eval()
    cells = [math.ceil(side / body.output_stride) for side in (67, 45)]
    assert body(torch.zeros(1, 3, 67, 45)).shape == (1, body.out_channels, *cells)


@pytest.mark.parametrize("build", [ResNet, resnext101, DenseNet])
@pytest.mark.parametrize(
    "stages, asked, reached, dilations",
    [
        (3, 32, 4, [1, 1, 1]),
        (3, 8, 4, [1, 1, 1]),
        (3, 2, 2, [1, 1, 2]),
        (4, 32, 8, [1, 1, 1, 1]),
        (4, 4, 4, [1, 1, 1, 2]),
        (4, 2, 2, [1, 1, 2, 4]),
    ],
)
def test_the_cifar_stem_keeps_the_resolution(build, stages, asked, reached, dilations):
    with torch.device("meta"):
        body = build(structure=(1,) * stages, output_stride=asked, stem="cifar")
        assert body.mod1(torch.empty(2, 3, 32, 32)).shape == (2, 64, 32, 32)
        assert body(torch.empty(2, 3, 32, 32)).shape == (2, body.out_channels, 32 // reached, 32 // reached)
    assert body.output_stride == reached
    found = [
        max(m.dilation[0] for m in getattr(body, f"mod{number}").modules() if isinstance(m, nn.Conv2d))
        for number in range(2, stages + 2)
    ]
    assert found == dilations


def test_classes_add_a_classifier_that_returns_logits():
    with torch.device("meta"):
        for build in (resnet34, densenet264, resnext101, wider_resnet38):
            network = build(classes=1000)
            assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
            assert network.classifier.fc.weight.shape == (1000, network.out_channels)
            assert set(network.state_dict()) - set(build().state_dict()) == {
                "classifier.fc.weight",
                "classifier.fc.bias",
            }


def test_names_and_shapes_of_the_resnext_release():
    with torch.device("meta"):
        network = resnext101(classes=1000)
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        assert [name for name, _ in resnext101(stem="7x7").mod1.named_parameters()] == ["conv1.weight"]
    assert [name for name in shapes if name.startswith("mod1.")] == [
        "mod1.conv1.weight",
        "mod1.bn1.weight",
        "mod1.bn1.bias",
        "mod1.conv2.weight",
        "mod1.bn2.weight",
        "mod1.bn2.bias",
        "mod1.conv3.weight",
    ]
    assert shapes["mod1.conv1.weight"] == (64, 3, 3, 3)
    assert shapes["mod2.block1.bn1.weight"] == (64,)
    assert shapes["mod2.block1.proj_conv.weight"] == (256, 64, 1, 1)
    assert shapes["mod2.block3.convs.conv1.weight"] == (128, 256, 1, 1)
    assert shapes["mod2.block3.convs.bn2.weight"] == (128,)
    assert shapes["mod4.block23.convs.conv2.weight"] == (512, 512 // 64, 3, 3)
    assert shapes["mod5.block1.proj_conv.weight"] == (2048, 1024, 1, 1)
    assert shapes["mod5.block3.convs.bn3.bias"] == (1024,)
    assert shapes["mod5.block3.convs.conv3.weight"] == (2048, 1024, 1, 1)
    assert shapes["bn_out.weight"] == (2048,)
    assert "mod4.block24.bn1.weight" not in shapes
    assert "mod2.block2.proj_conv.weight" not in shapes
    assert {"bn_out.running_mean", "mod2.block1.bn1.running_var"} <= set(network.state_dict())


def test_names_and_shapes_of_the_wider_resnet_release():
    with torch.device("meta"):
        plain, a2 = wider_resnet38(classes=1000), wider_resnet38_a2(classes=1000, output_stride=8)
    shapes = {name: tuple(p.shape) for name, p in plain.state_dict().items()}
    assert shapes == {name: tuple(p.shape) for name, p in a2.state_dict().items()}
    assert [name for name in shapes if name.startswith("mod1.")] == ["mod1.conv1.weight"]
    assert shapes["mod2.block1.proj_conv.weight"] == (128, 64, 1, 1)
    assert shapes["mod4.block6.convs.conv2.weight"] == (512, 512, 3, 3)
    assert shapes["mod5.block1.proj_conv.weight"] == (1024, 512, 1, 1)
    assert shapes["mod6.block1.convs.conv2.weight"] == (1024, 512, 3, 3)
    assert shapes["mod7.block1.convs.bn3.weight"] == (2048,)
    assert shapes["mod7.block1.convs.conv3.weight"] == (4096, 2048, 1, 1)
    assert not any("pool" in name for name in shapes)


def test_plain_weights_load_into_a2():
    torch.manual_seed(0)
    plain, a2 = small_wider(), small_wider_a2(output_stride=8)
    assert a2.load_state_dict(plain.state_dict(), strict=True).missing_keys == []


def test_where_the_networks_downsample_and_dilate():
    def layers(network, name):
        with_stride = [n for n, m in network.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
        dilations = {m.dilation[0] for m in getattr(network, name).modules() if isinstance(m, nn.Conv2d)} - {1}
        return with_stride, dilations

    with torch.device("meta"):
        strided, dilated = resnext101(), resnext101(output_stride=8)
        plain, a2, a2_dilated = wider_resnet38(), wider_resnet38_a2(), wider_resnet38_a2(output_stride=8)
    stage_starts = ["mod3.block1", "mod4.block1", "mod5.block1"]
    in_stage = ["convs.conv1", "proj_conv"]
    assert layers(strided, "mod5") == (
        ["mod1.conv1"] + [f"{s}.{c}" for s in stage_starts for c in in_stage],
        set(),
    )
    assert layers(dilated, "mod4") == (["mod1.conv1"] + [f"mod3.block1.{c}" for c in in_stage], {2})
    assert layers(dilated, "mod5")[1] == {4}
    for name, dilation in (("mod4", 2), ("mod5", 4)):
        for block in getattr(dilated, name):
            assert block.convs.conv2.dilation == block.convs.conv2.padding == (dilation, dilation)

    assert layers(plain, "mod7") == ([], set())
    pools = [name for name, module in plain.named_modules() if isinstance(module, nn.MaxPool2d)]
    assert pools == ["pool2", "pool3", "pool4", "pool5", "pool6"]
    starts = ["mod4.block1", "mod5.block1", "mod6.block1"]
    assert layers(a2, "mod7")[0] == [f"{s}.{c}" for s in starts for c in in_stage]
    assert [n for n, m in a2.named_modules() if isinstance(m, nn.MaxPool2d)] == ["pool2", "pool3"]
    assert layers(a2_dilated, "mod4") == ([f"mod4.block1.{c}" for c in in_stage], set())
    assert [layers(a2_dilated, name)[1] for name in ("mod5", "mod6", "mod7")] == [{2}, {4}, {4}]


def test_dropout_is_in_the_last_two_stages_of_a2_alone():
    def dropouts(network):
        return {name: m.p for name, m in network.named_modules() if isinstance(m, nn.Dropout2d)}

    assert dropouts(small_wider()) == {}
    assert dropouts(small_wider_a2()) == {"mod6.block1.convs.dropout": 0.3, "mod7.block1.convs.dropout": 0.5}
    assert dropouts(small_wider_a2(dropout=(0.0,) * 6)) == {}


@pytest.mark.parametrize("size", [(64, 96), (67, 45)])
@pytest.mark.parametrize("build", [small_resnext, small_wider_a2], ids=["resnext", "wider-a2"])
def test_features_at_stride_16_contain_those_at_stride_32(build, size):
    """Turning strides of 1x1 convolutions into dilation gives the same features at twice the resolution."""
    torch.manual_seed(0)
    strided = trained(build(output_stride=32))
    dilated = build(output_stride=16).double().eval()
    dilated.load_state_dict(strided.state_dict())
    images = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        coarse, fine = strided(images), dilated(images)
    assert coarse.std() > 0.1
    torch.testing.assert_close(fine[:, :, ::2, ::2], coarse, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [(64, 96), (67, 45)])
def test_resnext_features_at_stride_8_contain_those_at_stride_32(size):
    torch.manual_seed(0)
    strided = trained(small_resnext(output_stride=32))
    dilated = small_resnext(output_stride=8).double().eval()
    dilated.load_state_dict(strided.state_dict())
    images = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        coarse, fine = strided(images), dilated(images)
    torch.testing.assert_close(fine[:, :, ::4, ::4], coarse, rtol=1e-11, atol=1e-11)


def test_cifar_resnext_features_at_stride_2_contain_those_at_stride_4():
    torch.manual_seed(0)
    build = SMALL_BODIES["resnext-cifar"]
    strided, dilated = trained(build()), build(output_stride=2).double().eval()
    dilated.load_state_dict(strided.state_dict())
    images = torch.randn(1, 3, 33, 30, dtype=torch.float64)
    with torch.no_grad():
        coarse, fine = strided(images), dilated(images)
    assert coarse.shape[2:] == (9, 8) and fine.shape[2:] == (17, 15)
    torch.testing.assert_close(fine[:, :, ::2, ::2], coarse, rtol=1e-11, atol=1e-11)


def test_a2_at_stride_8_differs_from_stride_32_by_one_convolution_only():
    """The release dilates mod5's first convolution, a 3x3 that is strided at stride 32; they share the centre tap."""
    torch.manual_seed(0)
    strided = trained(small_wider_a2(output_stride=32))
    dilated = small_wider_a2(output_stride=8).double().eval()
    images = torch.randn(1, 3, 67, 45, dtype=torch.float64)

    def features():
        dilated.load_state_dict(strided.state_dict())
        with torch.no_grad():
            return strided(images), dilated(images)[:, :, ::4, ::4]

    coarse, fine = features()
    assert (coarse - fine).abs().max() > 1e-3
    weight = strided.mod5.block1.convs.conv1.weight.data
    centre = weight[:, :, 1, 1].clone()
    weight.zero_()[:, :, 1, 1] = centre
    torch.testing.assert_close(*features(), rtol=1e-11, atol=1e-11)


def a_step(name: str, norm: str) -> tuple[nn.Module, torch.Tensor]:
    """A network after one forward and backward pass in float64, and its logits."""
    torch.manual_seed(0)
    network = SMALL_BODIES[name](STRATEGIES[norm][2], classes=5).double()
    for module in network.modules():
        if isinstance(module, ABN):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    logits = network(torch.randn(3, 3, 64, 64, dtype=torch.float64))
    (logits * torch.randn_like(logits)).sum().backward()
    return network, logits.detach()


standard_step = cache(partial(a_step, norm="std"))


@every_body
@pytest.mark.parametrize("norm", STRATEGIES)
def test_every_parameter_gets_a_gradient_and_every_norm_the_same_one(name, norm):
    network, logits = a_step(name, norm)
    standard, expected = standard_step(name)
    torch.testing.assert_close(logits, expected, rtol=1e-8, atol=1e-8)
    for (key, parameter), reference in zip(network.named_parameters(), standard.parameters(), strict=True):
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-6, key
        scale = reference.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=1e-8 * max(1, scale), msg=key)
    for (key, buffer), reference in zip(network.named_buffers(), standard.buffers(), strict=True):
        torch.testing.assert_close(buffer, reference, rtol=1e-8, atol=1e-8, msg=key)


def kept_maps(name: str, norm: str) -> tuple[int, int]:
    """Bytes of all (N, C, H, W) tensors that a network keeps, and bytes of the inputs of its norms with activation."""
    network = SMALL_BODIES[name](STRATEGIES[norm][2])
    inputs = []
    recompute_activations(network, checkpointed_only=True)
    for module in network.modules():
        if isinstance(module, ABN) and module.activation != "identity":
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].nbytes))
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    _, saved = saved_for_backward(lambda: network(torch.randn(2, 3, 64, 64)))
    maps = [t for t in saved if t.dim() == 4 and t.untyped_storage()._cdata not in parameters]
    return sum(t.untyped_storage().nbytes() for t in maps), sum(inputs)


# Reversible units keep no inputs of norms, and average-pooling in their shortcuts keeps some.
@pytest.mark.parametrize("name", [name for name in SMALL_BODIES if not name.startswith(("preact", "revnet"))])
@pytest.mark.parametrize("norm", [norm for norm in STRATEGIES if norm != "std"])
def test_a_saving_norm_saves_exactly_the_inputs_of_the_norms_with_activation(name, norm):
    """Whatever else the body keeps: shortcuts, pooling indices, sums, concatenations, dropped channels."""
    standard, inputs = kept_maps(name, "std")
    saving, _ = kept_maps(name, norm)
    assert standard - saving == inputs > 0.15 * standard


@every_body
def test_channels_last_flows_through_every_layer(name):
    torch.manual_seed(0)
    network = trained(SMALL_BODIES[name]())
    images = torch.randn(2, 3, 65, 97, dtype=torch.float64)
    expected = network(images)
    layouts = {}
    for name, module in network.named_modules():
        module.register_forward_hook(
            lambda _, __, out, name=name: layouts.update({name: out.is_contiguous(memory_format=torch.channels_last)})
        )
    features = network.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert features.shape[2] > 1 and not features.is_contiguous()
    assert [name for name, kept in layouts.items() if not kept] == []
    torch.testing.assert_close(features, expected, rtol=1e-10, atol=1e-10)


@every_body
def test_a_step_under_fake_tensors_and_bfloat16_autocast(name):
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        network = SMALL_BODIES[name](classes=5)
        logits = network(torch.randn(2, 3, 64, 64))
        logits.sum().backward()
    assert logits.shape == (2, 5) and logits.dtype == torch.bfloat16
    assert all(p.grad.shape == p.shape for p in network.parameters())


def test_a_seed_fixes_the_weights_and_their_scale_is_xavier():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = resnext101(structure=(1, 1, 1, 1), classes=1000)
        torch.manual_seed(3)
        second = resnext101(structure=(1, 1, 1, 1), classes=1000)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    gain = math.sqrt(2 / (1 + 0.01**2))
    grouped = first.mod5.block1.convs.conv2.weight  # (1024, 1024 / 64, 3, 3)
    assert grouped.std().item() == pytest.approx(gain * math.sqrt(2 / (9 * 16 + 9 * 1024)), rel=0.02)
    bound = 0.1 * math.sqrt(6 / (2048 + 1000))
    linear = first.classifier.fc.weight
    assert linear.abs().max().item() == pytest.approx(bound, rel=1e-3) and linear.abs().max() <= bound
    assert linear.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not first.classifier.fc.bias.any()
    assert first.bn_out.weight.eq(1).all() and first.bn_out.bias.eq(0).all()


@pytest.mark.parametrize(
    "build, options, message",
    [
        (resnext101, dict(stem="5x5"), "stem='5x5': expected '3x3' or '7x7', or 'cifar'"),
        (resnext101, dict(structure=(1, 1, 1)), r"structure=\(1, 1, 1\): expected four"),
        (densenet264, dict(structure=(1, 1, 1)), "with stem='cifar' three or four.*but stem='3x3'"),
        (resnet50, dict(structure=(1, 1), stem="cifar"), r"structure=\(1, 1\): expected four.*three or four"),
        (resnet50, dict(base_channels=(8,)), r"channels=\(8,\): expected two values .* or three"),
        (densenet264, dict(structure=(1, 1, 0, 1)), "0 blocks.*at least 1"),
        (resnet34, dict(output_stride=4), "output_stride=4: expected 8, 16 or 32 after a stem of stride 4"),
        (resnet34, dict(output_stride=1, stem="cifar"), "output_stride=1: expected 2, 4, 8, 16 or 32 after"),
        (resnext101, dict(structure=(1, 0, 1, 1)), "0 blocks.*at least 1"),
        (resnext101, dict(base_channels=(8, 8)), r"base_channels=\(8, 8\): expected three"),
        (resnext101, dict(groups=48), "groups=48 does not divide"),
        (resnext152, dict(output_stride=4), "output_stride=4: expected 8"),
        (wider_resnet38, dict(output_stride=8), "output_stride=8 .*expected 32.*wider_resnet38_a2"),
        (wider_resnet38_a2, dict(output_stride=64), "output_stride=64: expected 8"),
        (wider_resnet38_a2, dict(structure=(1, 1)), r"structure=\(1, 1\): expected six"),
        (wider_resnet38_a2, dict(dropout=(0.3, 0.5)), r"dropout=\(0.3, 0.5\): expected six"),
    ],
)
def test_wrong_options_name_the_value_and_the_expectation(build, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("name", [name for name in SMALL_BODIES if not name.startswith("revnet")])
def test_hooks_on_stages_fire(name):
    """Feature extractors read stages; only `recompute_blocks` and reversible bodies run their blocks one by one."""
    body, seen = SMALL_BODIES[name](ABN), []
    stages = [name for name, _ in body.named_children() if name.startswith(("mod", "pool", "tra"))]
    for name in stages:
        body.get_submodule(name).register_forward_hook(lambda module, args, y, name=name: seen.append(name))
    body(torch.randn(2, 3, 32, 32))
    assert sorted(seen) == sorted(stages)
