"""ResNet: it computes what torchvision's does, and what a conversion changes."""

from functools import partial

import pytest
import torch
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from models.bodies import resnet34, resnet50
from models.convert import to_inplace
from models.layers import ABN, InPlaceABN
from models.loading import load_by_name
from models.torchvision_names import from_torchvision
from tests.bodies import small_resnet, trained

RELU = partial(ABN, activation="relu")


@pytest.mark.parametrize(
    "build, block, structure",
    [
        (resnet34, BasicBlock, (1, 2, 1, 1)),
        (resnet50, Bottleneck, (1, 2, 1, 1)),
        pytest.param(resnet50, Bottleneck, (3, 4, 6, 3), marks=pytest.mark.slow),
    ],
)
def test_torchvision_s_weights_give_torchvision_s_function(build, block, structure):
    """In eval and in training mode, with the statistics that the latter leaves and the first convolution's gradient."""
    torch.manual_seed(0)
    theirs = trained(ResNet(block, structure, num_classes=7))
    ours = build(RELU, classes=7, structure=structure).double().eval()
    report = load_by_name(ours, from_torchvision(theirs.state_dict()), source="", name="", advice="")
    assert not report.skipped and not report.new
    images = torch.randn(3, 3, 33, 32, dtype=torch.float64)
    with torch.no_grad():
        logits, expected = ours(images), theirs(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())

    logits, expected = ours.train()(images), theirs.train()(images)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())
    torch.testing.assert_close(ours.state_dict(), from_torchvision(theirs.state_dict()), rtol=1e-9, atol=1e-9)
    weights = (ours.mod1.conv1.weight, theirs.conv1.weight)
    pairs = zip((logits, expected), weights, strict=True)
    gradient, reference = (torch.autograd.grad(out.square().mean(), weight)[0] for out, weight in pairs)
    torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-7 * reference.abs().max().item())


def test_a_conversion_changes_the_activation_after_the_sum_too():
    """It is read from the first norm, so relu becomes the paper's leaky relu everywhere."""
    torch.manual_seed(0)
    relu, leaky = trained(small_resnet(RELU)), trained(small_resnet(InPlaceABN))
    converted = to_inplace(relu, relu_slope=0.01)
    leaky.load_state_dict(converted.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert converted.mod2.block1.activation == ("leaky_relu", 0.01)
    torch.testing.assert_close(converted(images), leaky(images), rtol=0, atol=0)
