"""RevNets and their ResNets: units against a reference written from the paper, gradients of reversible networks."""

import copy
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from keepless import ABN, CheckpointedABN, InPlaceABN, checking_repetitions
from models.blocks import Convolutions
from models.bodies import RevNet, revnet38_cifar
from models.bodies.revnet_units import ResidualUnit, ReversibleUnit
from models.initialisation import initialise_truncated
from models.released_norm import released_abn

RELU = partial(ABN, activation="relu", eps=1e-3)


@pytest.fixture(autouse=True)
def checks():
    with checking_repetitions():
        yield


def bn_relu(x, norm):
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=1e-3).relu()


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
    pooled = F.avg_pool2d(x, stride)
    zeros = torch.zeros_like(pooled[:, :1]).expand(-1, (channels - x.shape[1]) // 2, -1, -1)
    return torch.cat([zeros, pooled, zeros], 1)


@pytest.mark.parametrize("after_stem", [False, True])
@pytest.mark.parametrize(
    "in_channels, channels, stride", [(8, (8, 8), 1), (8, (16, 16), 2), (16, (4, 4, 16), 1), (16, (8, 8, 32), 2)]
)
@pytest.mark.parametrize("reversible", [True, False])
def test_units_compute_what_the_paper_says(reversible, in_channels, channels, stride, after_stem):
    torch.manual_seed(0)
    build = ReversibleUnit if reversible else ResidualUnit
    unit = build(Convolutions(in_channels, channels, stride), RELU).double()
    if after_stem:
        del unit.Fm.bn1
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
WIDTHS = [(c, c, 4 * c) for c in (4, 8, 12, 14)]
BOTTLENECKS = dict(structure=(1, 2, 2, 1), channels=WIDTHS, stem_channels=8, stem="7x7")
NORMS = {
    "std": RELU,
    "inplace": InPlaceABN,
    "checkpoint": partial(CheckpointedABN, activation="relu"),
    "checkpoint_xhat": partial(CheckpointedABN, store="x_hat"),
}
OPTIONS = {"basic": SMALL, "bottleneck": BOTTLENECKS, "dilated": BOTTLENECKS | {"output_stride": 8}}
# The first unit can be inverted in a basic network alone; the norms' own ways back are tested with the layers.
CASES = [*zip(cycle(("basic", "bottleneck")), NORMS), ("basic", "inplace"), ("dilated", "std")]


def assert_equal_to_stored(norm_act, options) -> None:
    """Gradients and running statistics of one step."""
    torch.manual_seed(0)
    network = RevNet(norm_act=norm_act, classes=3, **options).double()
    stored = copy.deepcopy(network)
    stored.keep_activations = True
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    results = []
    for net in (network, stored):
        (net(images) ** 2).sum().backward()
        results.append([*(p.grad for p in net.parameters()), *net.buffers()])
    for tensor, expected in zip(*results, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-9 * max(1e-3, expected.abs().max().item()))


@pytest.mark.parametrize("options, norm", CASES)
def test_reversible_networks_have_the_gradients_of_stored_ones(options, norm):
    assert_equal_to_stored(NORMS[norm], OPTIONS[options])


@pytest.mark.peer
def test_the_released_package_s_norms_fit_reversible_units():
    """They get a copy to write over, and their running statistics move once a step."""
    pytest.importorskip("inplace_abn")
    assert_equal_to_stored(partial(released_abn(), activation="leaky_relu"), BOTTLENECKS)


def test_initial_weights_are_truncated_at_two_standard_deviations():
    torch.manual_seed(0)
    convolution = revnet38_cifar(structure=(1, 1, 1)).mod4.block1.Gm.conv1  # (56, 56, 3, 3)
    initialise_truncated(flat := torch.nn.Conv2d(56, 56, (1, 9)))
    std = (2 / (9 * 56)) ** 0.5
    for weight in (convolution.weight, flat.weight):
        assert 1.99 * std < weight.abs().max() <= 2 * std
        assert weight.std().item() == pytest.approx(0.8796 * std, rel=0.01)  # of a normal distribution cut off there
