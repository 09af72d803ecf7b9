"""All bodies: published parameter counts, what dilation preserves, every norm."""

import math
import subprocess
import sys
from functools import cache, partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

from keepless import ABN, recompute_activations
from models import bodies
from models.bodies import DenseNet, ResNet, densenet264, resnet34, resnet50, resnext101, timm_body, torchvision_body
from tests.bodies import SMALL_BODIES, kept_maps, parameters, small_wider, small_wider_a2, trained
from tests.norms import STRATEGIES
from tests.runs import same

every_body = pytest.mark.parametrize("name", SMALL_BODIES)


FREED = """
import weakref, torch
from tests.bodies import SMALL_BODIES
for name in [name for name in SMALL_BODIES if not name.startswith("revnet")]:
    body, stem = SMALL_BODIES[name](), []
    body.mod1.register_forward_hook(lambda module, images, output: stem.append(weakref.ref(output)))
    body.mod3.register_forward_pre_hook(lambda *_: stem.append(stem[0]()))
    with torch.no_grad():
        body(torch.randn(2, 3, 64, 64))
    assert stem[1] is None, name
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps a call's arguments until it returns")
def test_the_stem_s_output_is_freed_when_the_first_stage_has_read_it():
    """It runs in another process, because a traceback that another test has left could keep the tensor alive."""
    subprocess.run([sys.executable, "-c", FREED], check=True, cwd=Path(__file__).parents[2])


LIBRARY = {
    "torchvision": partial(torchvision_body, network="mobilenet_v3_small", output_stride=16),
    "timm": partial(timm_body, network="mobilenetv3_small_050", output_stride=16),
}


@pytest.mark.parametrize("name", [*SMALL_BODIES, *LIBRARY])
def test_images_of_any_number_of_channels_differ_in_the_first_convolution_alone(name):
    torch.manual_seed(0)
    build = (SMALL_BODIES | LIBRARY)[name]
    three, five = build(), build(in_channels=5)
    names = [*three.state_dict()]
    differ = [key for key in five.state_dict() if five.state_dict()[key].shape != three.state_dict()[key].shape]
    assert differ == names[:1] and five.state_dict()[names[0]].shape[1] == 5
    images = torch.randn(2, 5, 64, 64)
    assert five(images).shape == three(images[:, :3]).shape


@pytest.mark.parametrize(
    "build, classes, expected",
    [
        (partial(ResNet, structure=(5,) * 3, base_channels=(16, 16), stem_channels=16, stem="cifar"), 10, 466_906),
        (partial(DenseNet, structure=(16,) * 3, growth=12, stem_channels=24, stem="cifar"), 10, 769_162),
        (bodies.resnet32_cifar, 10, 464_154),
        (bodies.resnet110_cifar, 100, 1_733_812),
        (bodies.resnet164_cifar, 10, 1_703_258),
        (bodies.revnet38_cifar, 100, 475_060),
        (bodies.revnet110_cifar, 10, 1_729_194),
        (bodies.revnet164_cifar, 100, 1_794_948),
        (bodies.preact_resnet101, 1000, 44_541_480),
        (bodies.revnet104, 1000, 45_428_072),
    ],
)
def test_parameter_counts_of_published_networks(build, classes, expected):
    """MemCNN, DenseNet's paper (0.8 million) and RevNet publish them; test_released.py has shapes of the others."""
    with torch.device("meta"):
        assert parameters(build(classes=classes)) == expected


@every_body
def test_small_bodies_keep_to_what_every_processor_computes_rightly(name):
    """See CONTRIBUTING.md: strided 1x1 convolutions of fewer channels write outside of their buffers with AVX2."""
    with torch.device("meta"):
        convolutions = [module for module in SMALL_BODIES[name]().modules() if isinstance(module, nn.Conv2d)]
    strided = [conv for conv in convolutions if conv.kernel_size == (1, 1) and conv.stride != (1, 1)]
    assert all(conv.in_channels >= 8 for conv in strided), strided


# Stages, output stride asked for and reached, dilations.
CIFAR = [(3, 32, 4, [1, 1, 1]), (3, 2, 2, [1, 1, 2]), (4, 32, 8, [1, 1, 1, 1]), (4, 4, 4, [1, 1, 1, 2])]


@pytest.mark.parametrize("build", [ResNet, resnext101, DenseNet])
@pytest.mark.parametrize("stages, requested, reached, dilations", CIFAR)
def test_the_cifar_stem_keeps_the_resolution(build, stages, requested, reached, dilations):
    with torch.device("meta"):
        body = build(structure=(1,) * stages, output_stride=requested, stem="cifar")
        assert body.mod1(torch.empty(2, 3, 32, 32)).shape == (2, 64, 32, 32)
        assert body(torch.empty(2, 3, 32, 32)).shape == (2, body.out_channels, 32 // reached, 32 // reached)
    assert body.output_stride == reached
    actual = [
        max(m.dilation[0] for m in getattr(body, f"mod{number}").modules() if isinstance(m, nn.Conv2d))
        for number in range(2, stages + 2)
    ]
    assert actual == dilations


def test_dropout_is_before_the_last_convolution_in_the_last_two_stages_of_a2_alone():
    def dropouts(network):
        return {name: m.p for name, m in network.named_modules() if isinstance(m, nn.Dropout2d)}

    assert dropouts(small_wider()) == {}
    assert dropouts(small_wider_a2()) == {"mod6.block1.convs.dropout": 0.3, "mod7.block1.convs.dropout": 0.5}
    assert dropouts(small_wider_a2(dropout=(0.0,) * 6)) == {}
    assert [*small_wider_a2().mod6.block1.convs._modules][-2:] == ["dropout", "conv3"]


@pytest.mark.parametrize(
    "name, output_stride, factor", [("resnext", 16, 2), ("resnext", 8, 4), ("resnext-cifar", 2, 2), ("wider-a2", 16, 2)]
)
@torch.no_grad()
def test_features_of_a_dilated_body_contain_the_strided_body_s(name, output_stride, factor):
    """Turning strides of 1x1 convolutions into dilation gives the same features at `factor` times the resolution."""
    torch.manual_seed(0)
    strided = trained(SMALL_BODIES[name]())
    dilated = SMALL_BODIES[name](output_stride=output_stride).double().eval()
    dilated.load_state_dict(strided.state_dict())
    images = torch.randn(1, 3, 67, 45, dtype=torch.float64)
    coarse, fine = strided(images), dilated(images)
    assert coarse.std() > 0.1 and fine.shape[2:] == (math.ceil(67 / output_stride), math.ceil(45 / output_stride))
    torch.testing.assert_close(fine[:, :, ::factor, ::factor], coarse, rtol=1e-11, atol=1e-11)


STRIDED_3X3 = [
    ("wider-a2", "mod5.block1.convs.conv1"),
    ("resnet", "mod4.block1.convs.conv2 mod5.block1.convs.conv2"),
    ("resnet-basic", "mod4.block1.convs.conv1 mod5.block1.convs.conv1"),
]


@pytest.mark.parametrize("name, convolutions", STRIDED_3X3)
@torch.no_grad()
def test_stages_that_start_with_a_strided_3x3_convolution_differ_by_it_alone(name, convolutions):
    """The release dilates it where it is not strided; with and without the stride, only the centre tap is shared."""
    torch.manual_seed(0)
    network = trained(SMALL_BODIES[name]())
    dilated = SMALL_BODIES[name](output_stride=8).double().eval()
    images = torch.randn(1, 3, 67, 45, dtype=torch.float64)

    def features():
        dilated.load_state_dict(network.state_dict())
        return network(images), dilated(images)[:, :, ::4, ::4]

    coarse, fine = features()
    assert (coarse - fine).abs().max() > 1e-3
    for convolution in convolutions.split():
        weight = network.get_submodule(convolution).weight
        centre = weight[:, :, 1, 1].clone()
        weight.zero_()[:, :, 1, 1] = centre
    torch.testing.assert_close(*features(), rtol=1e-11, atol=1e-11)


def a_step(name: str, norm: str) -> tuple[nn.Module, torch.Tensor]:
    """A network after one forward and backward pass in float64, and its logits."""
    torch.manual_seed(0)
    network = SMALL_BODIES[name](STRATEGIES[norm], classes=5).double()
    for module in network.modules():
        if isinstance(module, ABN):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    logits = network(torch.randn(3, 3, 40, 40, dtype=torch.float64))
    (logits * torch.randn_like(logits)).sum().backward()
    return network, logits.detach()


standard_step = cache(partial(a_step, norm="std"))
OTHERS = [norm for norm in STRATEGIES if norm not in ("std", "inplace")]


def with_norms(names: list[str]) -> list[tuple[str, str]]:
    """Every body with in-place norms, and with one of the other norms in turn."""
    in_turn = zip(names, cycle(OTHERS), strict=False)
    return [*((name, "inplace") for name in names), *in_turn]


@pytest.mark.table
@pytest.mark.parametrize("name, norm", with_norms(list(SMALL_BODIES)))
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


def kept_values(name: str, norm: str) -> tuple[int, int]:
    """Bytes of all (N, C, H, W) tensors that a network keeps, and bytes of the inputs of its norms with activation."""
    network = SMALL_BODIES[name](STRATEGIES[norm])
    inputs = []
    recompute_activations(network, checkpointed_only=True)
    for module in network.modules():
        if isinstance(module, ABN) and module.activation != "identity":
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].nbytes))
    return sum(kept_maps(network, torch.randn(2, 3, 32, 32)).values()), sum(inputs)


standard_values = cache(partial(kept_values, norm="std"))
# Bodies whose norms read convolutions, residual sums or concatenations. Other operations may save a norm's input too:
# reversible units save none, and average-pooling in their shortcuts saves some.
SUMS = [name for name in SMALL_BODIES if name.startswith(("resnet", "resnext", "densenet", "wider"))]


@pytest.mark.parametrize("name, norm", with_norms(SUMS))
def test_a_saving_norm_saves_exactly_the_inputs_of_the_norms_with_activation(name, norm):
    """The rest that a body keeps stays the same: shortcuts, pooling indices, sums, concatenations, dropped channels."""
    standard, inputs = standard_values(name)
    saving, _ = kept_values(name, norm)
    assert standard - saving == inputs > 0.15 * standard


@every_body
def test_channels_last_flows_through_every_layer(name):
    """Odd sizes are rounded up. Hooks on stages fire; only reversible bodies run their units one by one."""
    torch.manual_seed(0)
    network, layouts = trained(SMALL_BODIES[name]()), []
    images = torch.randn(2, 3, 67, 45, dtype=torch.float64)
    expected = network(images)

    def note(layer: str, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        layouts.append((layer, output.is_contiguous(memory_format=torch.channels_last)))

    for layer, module in network.named_modules():
        module.register_forward_hook(partial(note, layer))
    features = network.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    cells = [math.ceil(side / network.output_stride) for side in (67, 45)]
    assert features.shape == (2, network.out_channels, *cells) and not features.is_contiguous()
    assert [layer for layer, kept in layouts if not kept] == []
    torch.testing.assert_close(features, expected, rtol=1e-10, atol=1e-10)
    if not name.startswith("revnet"):
        stages = [stage for stage, _ in network.named_children() if stage.startswith(("mod", "pool", "tra"))]
        assert sorted(layer for layer, _ in layouts if layer in stages) == sorted(stages)


def test_a_seed_fixes_the_weights_and_their_scale_is_xavier():
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(resnext101(structure=(1, 1, 1, 1), classes=1000))
    first, second = networks
    assert same(first.state_dict(), second.state_dict())
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
        (densenet264, dict(structure=(1, 1, 1)), "with stem='cifar' three or four.*but stem='3x3'"),
        (resnet50, dict(base_channels=(8,)), r"channels=\(8,\): expected two values .* or three"),
        (resnet34, dict(output_stride=4), "output_stride=4: expected 8, 16 or 32 after a stem of stride 4"),
        (resnext101, dict(structure=(1, 0, 1, 1)), "0 blocks.*at least 1"),
        (SMALL_BODIES["revnet"], dict(channels=((8, 8), (16, 16))), "one entry per stage, and structure=.* has 3"),
        (SMALL_BODIES["revnet"], dict(channels=[(8, 8)] * 2 + [(9, 9)]), r"channels=\(9, 9\) after 8 channels.*even"),
        (bodies.wider_resnet38, dict(output_stride=8), "output_stride=8 .*expected 32.*wider_resnet38_a2"),
        (bodies.wider_resnet38_a2, dict(structure=(1, 1)), r"structure=\(1, 1\): expected six"),
    ],
)
def test_wrong_options_name_the_value_and_the_expectation(build, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build(**options)
