"""RevNets and their ResNets: parameters as published, units against a reference written from the paper, memory."""

import copy
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from models import bodies
from models.bodies import RevNet, preact_resnet101, revnet38_cifar, revnet104
from models.bodies.revnet_units import ResidualUnit, ReversibleUnit
from models.initialisation import initialise_truncated
from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.package import package_abn
from scripts.bench.measuring import kept_bytes

RELU = partial(ABN, activation="relu", eps=1e-3)


@pytest.mark.parametrize(
    "name, classes, parameters",
    [
        ("resnet32_cifar", 10, 464_154),
        ("resnet32_cifar", 100, 470_004),
        ("revnet38_cifar", 10, 464_890),
        ("revnet38_cifar", 100, 475_060),
        ("resnet110_cifar", 10, 1_727_962),
        ("resnet110_cifar", 100, 1_733_812),
        ("revnet110_cifar", 10, 1_729_194),
        ("revnet110_cifar", 100, 1_740_804),
        ("resnet164_cifar", 10, 1_703_258),
        ("resnet164_cifar", 100, 1_726_388),
        ("revnet164_cifar", 10, 1_748_778),
        ("revnet164_cifar", 100, 1_794_948),
        ("preact_resnet101", 1000, 44_541_480),
        ("revnet104", 1000, 45_428_072),
    ],
)
def test_parameters_are_the_release_s(name, classes, parameters):
    with torch.device("meta"):
        network = getattr(bodies, name)(classes=classes)
    assert sum(p.numel() for p in network.parameters()) == parameters


def bn_relu(x, norm):
    """In training mode."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    scale, shift = norm.weight.view(1, -1, 1, 1), norm.bias.view(1, -1, 1, 1)
    return ((x - mean) / (var + 1e-3).sqrt() * scale + shift).clamp(min=0)


def residual(x, branch, stride, activated=False):
    """The paper's residual functions: norm, ReLU and convolution, two or three times."""
    x = x if activated else bn_relu(x, branch.bn1)
    kernels = [conv.weight for name, conv in branch.named_children() if name.startswith("conv")]
    for number, kernel in enumerate(kernels, start=1):
        if number > 1:
            x = bn_relu(x, getattr(branch, f"bn{number}"))
        x = F.conv2d(x, kernel, stride=stride if number == 1 else 1, padding=kernel.shape[-1] // 2)
    return x


def short(x, module, channels, stride):
    if stride == 1 and channels == x.shape[1]:
        return x
    if hasattr(module, "weight"):
        return F.conv2d(x, module.weight, stride=stride)
    n, c, h, w = x.shape
    pooled = x.view(n, c, h // stride, stride, w // stride, stride).mean((3, 5))
    zeros = torch.zeros(n, (channels - c) // 2, h // stride, w // stride, dtype=x.dtype)
    return torch.cat([zeros, pooled, zeros], 1)


@pytest.mark.parametrize("after_stem", [False, True])
@pytest.mark.parametrize(
    "in_channels, channels, stride", [(8, (8, 8), 1), (8, (16, 16), 2), (16, (4, 4, 16), 1), (16, (8, 8, 32), 2)]
)
@pytest.mark.parametrize("reversible", [True, False])
def test_units_compute_what_the_paper_says(reversible, in_channels, channels, stride, after_stem):
    torch.manual_seed(0)
    build = ReversibleUnit if reversible else ResidualUnit
    unit = build(in_channels, channels, norm_act=RELU, stride=stride, after_stem=after_stem).double()
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, in_channels, 8, 6, dtype=torch.float64)
    if reversible:
        x1, x2 = x.chunk(2, 1)
        out = channels[-1] // 2
        y1 = residual(x2, unit.Fm, stride, after_stem) + short(x1, unit.short1, out, stride)
        expected = torch.cat([y1, residual(y1, unit.Gm, 1) + short(x2, unit.short2, out, stride)], 1)
    else:
        expected = residual(x, unit.Fm, stride, after_stem) + short(x, unit.short, channels[-1], stride)
    torch.testing.assert_close(unit(x), expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())


SMALL = dict(structure=(2, 3, 2), channels=((8, 8), (16, 16), (20, 20)), stem_channels=8)
BOTTLENECKS = dict(
    structure=(1, 2, 2, 1), channels=[(c, c, 4 * c) for c in (4, 8, 12, 14)], stem_channels=8, stem="7x7"
)
NORMS = {
    "std": RELU,
    "inplace": InPlaceABN,
    "checkpoint": partial(CheckpointedABN, activation="relu"),
    "checkpoint_xhat": partial(CheckpointedABN, store="x_hat"),
}


OPTIONS = {"basic": SMALL, "bottleneck": BOTTLENECKS, "dilated": BOTTLENECKS | {"output_stride": 8}}
# The first unit can be inverted in a basic network alone; the norms' own ways back are tested with the layers.
CASES = [*zip(cycle(("basic", "bottleneck")), NORMS), ("basic", "inplace"), ("dilated", "std")]


@pytest.mark.parametrize("options, norm", CASES)
def test_reversible_networks_have_the_gradients_of_stored_ones(options, norm):
    torch.manual_seed(0)
    network = RevNet(norm_act=NORMS[norm], classes=3, **OPTIONS[options]).double()
    stored = copy.deepcopy(network)
    stored.keep_activations = True
    assert_equal_steps(network, stored)


def assert_equal_steps(network, stored) -> None:
    """Gradients and running statistics of one step."""
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    results = []
    for net in (network, stored):
        (net(images) ** 2).sum().backward()
        results.append([*(p.grad for p in net.parameters()), *net.buffers()])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * max(1e-3, expected.abs().max().item()))


def test_the_released_package_s_norms_fit_reversible_units():
    """They get a copy to write over, and their running statistics move once a step."""
    pytest.importorskip("inplace_abn")
    network = RevNet(partial(package_abn(), activation="leaky_relu"), classes=3, **BOTTLENECKS).double()
    stored = copy.deepcopy(network)
    stored.keep_activations = True
    assert_equal_steps(network, stored)


@pytest.mark.parametrize("norm", NORMS)
def test_saved_bytes_do_not_depend_on_the_depth(norm):
    images = torch.randn(2, 3, 32, 32)
    networks = [RevNet(NORMS[norm], classes=3, **SMALL | {"structure": (units,) * 3}) for units in (2, 4)]
    shallow, deep = (kept_bytes(network, partial(network, images), [images]) for network in networks)
    assert shallow == deep


def test_streams_are_float32_under_autocast():
    """Residual functions compute in bfloat16; the sums that they are added to, which are restored, do not."""
    network = RevNet(norm_act=RELU, classes=3, **BOTTLENECKS)
    dtypes = []
    for name, module in network.named_modules():
        if name.endswith(("Fm", "Gm")):
            module.register_forward_hook(lambda m, args, y: dtypes.append((args[0].dtype, y.dtype)))
        if name.endswith("Fm.bn2"):
            module.register_forward_hook(lambda m, args, y: dtypes.append((torch.float32, y.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(torch.randn(2, 3, 32, 32))
    logits.float().sum().backward()
    assert set(dtypes) == {(torch.float32, torch.bfloat16)} and len(dtypes) == 2 * 18


@pytest.mark.parametrize(
    "options, message",
    [
        (SMALL | {"channels": ((8, 8), (16, 16))}, "one entry per stage, and structure=.* has 3"),
        (SMALL | {"channels": ((8, 8), (16, 16), (21, 21))}, r"channels=\(21, 21\) after 16 channels.*even numbers"),
        (SMALL | {"channels": ((8, 8), (16, 16), (8, 8))}, "4 channels less than the one before"),
        (SMALL | {"channels": ((8,), (16,), (20,))}, "expected two values"),
        (SMALL | {"structure": (2, 0, 2)}, "at least 1 block"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RevNet(**options)


def test_initial_weights_are_truncated_at_two_standard_deviations():
    torch.manual_seed(0)
    convolution = revnet38_cifar(structure=(1, 1, 1)).mod4.block1.Gm.conv1  # (56, 56, 3, 3)
    initialise_truncated(flat := torch.nn.Conv2d(56, 56, (1, 9)))
    std = (2 / (9 * 56)) ** 0.5
    for weight in (convolution.weight, flat.weight):
        assert 1.99 * std < weight.abs().max() <= 2 * std
        assert weight.std().item() == pytest.approx(0.8796 * std, rel=0.01)  # of a normal distribution cut off there


def test_names_of_modules():
    with torch.device("meta"):
        names = {name.rpartition(".")[0] for name in revnet104(classes=1000).state_dict()}
        residual_names = {name.rpartition(".")[0] for name in preact_resnet101(classes=1000).state_dict()}
    assert {"mod1.conv1", "mod1.bn1", "mod2.block1.Fm.conv3", "mod5.block2.Gm.bn1", "mod5.block1.short2"} <= names
    assert "mod2.block1.Fm.bn1" not in names and "mod2.block1.Gm.bn1" in names  # the stem has activated its input
    assert {"mod4.block23.Fm.conv3", "mod3.block1.short", "bn_out", "classifier.fc"} <= residual_names
