"""ResNet: it computes what torchvision's does, and what a conversion changes."""

import re
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import DenseNet, ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from engine import assemble
from keepless import ABN, InPlaceABN
from keepless.conversion.convert import to_inplace
from models.bodies import densenet264, resnet34, resnet50
from models.checkpoints.loading import load_by_name
from models.checkpoints.torchvision_names import from_torchvision
from tests.bodies import small_resnet, trained
from tests.runs import run_config

RELU = partial(ABN, activation="relu")


class Narrow(ResNet):
    """A ResNet with an eighth of the channels behind the stem."""

    def _make_layer(self, block, planes, *args, **options):
        return super()._make_layer(block, planes // 8, *args, **options)


@pytest.mark.parametrize("block, build, channels", [(BasicBlock, resnet34, (8, 8)), (Bottleneck, resnet50, (8, 8, 32))])
def test_torchvision_s_weights_give_torchvision_s_function(block, build, channels):
    """Both modes are compared, the statistics that training leaves, and the first convolution's gradient."""
    torch.manual_seed(0)
    ours = build(RELU, classes=7, structure=(1, 2, 1, 1), base_channels=channels).double().eval()
    library = Narrow(block, (1, 2, 1, 1))
    library.fc = nn.Linear(ours.out_channels, 7)
    trained(library)
    report = load_by_name(ours, from_torchvision(library.state_dict()), source="", name="", advice="")
    assert not report.skipped and not report.new
    images = torch.randn(3, 3, 33, 32, dtype=torch.float64)
    with torch.no_grad():
        logits, expected = ours(images), library(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())

    logits, expected = ours.train()(images), library.train()(images)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())
    torch.testing.assert_close(ours.state_dict(), from_torchvision(library.state_dict()), rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(logits.square().mean(), ours.mod1.conv1.weight)
    (reference,) = torch.autograd.grad(expected.square().mean(), library.conv1.weight)
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


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "densenet121"])
def test_torchvision_s_names_and_shapes_become_ours(name):
    with torch.device("meta"):
        library = getattr(torchvision.models, name)(weights=None)
        ours = assemble.body(run_config(f"body={name}").body, ABN, classes=1000)
    shapes = {name: tensor.shape for name, tensor in from_torchvision(library.state_dict()).items()}
    assert shapes == {name: tensor.shape for name, tensor in ours.state_dict().items()}


@torch.no_grad()
def test_densenet_and_resnext_compute_what_torchvision_s_do():
    """Narrow networks are compared in both modes; a DenseNet's file may have the names under which it was published."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    grouped = dict(structure=(1, 1, 1, 1), base_channels=(16, 16, 32), groups=4)
    dense = dict(structure=(2, 1, 2, 1), growth=4, stem="7x7", stem_norm=True)
    pairs = (
        (DenseNet(growth_rate=4, block_config=(2, 1, 2, 1)), densenet264(RELU, classes=1000, **dense)),
        (Narrow(Bottleneck, (1, 1, 1, 1), groups=4, width_per_group=32), resnet50(RELU, classes=1000, **grouped)),
    )
    for library, ours in pairs:
        if isinstance(library, ResNet):
            library.fc = nn.Linear(ours.out_channels, 1000)
        state = trained(library).state_dict()
        old = {re.sub(r"(denselayer\d+\.(norm|conv))(\d)", r"\1.\3", name): tensor for name, tensor in state.items()}
        ours.double().load_state_dict(from_torchvision(old))
        torch.testing.assert_close(ours.eval()(images), library.eval()(images), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours.train()(images), library.train()(images), rtol=1e-9, atol=1e-9)


def test_other_networks_are_refused():
    with torch.device("meta"):
        tensors = torchvision.models.mnasnet0_5(weights=None).state_dict()
    with pytest.raises(ValueError, match="a ResNet, ResNeXt or DenseNet, found layers.0.weight"):
        from_torchvision(tensors)
