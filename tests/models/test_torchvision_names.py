"""torchvision's ResNets under our names compute the same."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from models import bodies
from models.layers import ABN
from models.loading import load_by_name
from models.torchvision_names import from_torchvision


def random_resnet(name: str) -> nn.Module:
    """With statistics, scales and shifts as after a training."""
    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(weights=None).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.0)
            module.bias.data.uniform_(-0.2, 0.2)
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.8, 1.5)
    return network


@pytest.mark.parametrize("name", ["resnet34", "resnet50", "resnet101"])
@torch.no_grad()
def test_outputs_are_torchvisions(name):
    theirs = random_resnet(name)
    ours = getattr(bodies, name)(norm_act=partial(ABN, activation="relu"), classes=1000).eval()
    tensors = from_torchvision(theirs.state_dict())
    assert tensors.keys() == ours.state_dict().keys()
    report = load_by_name(ours, tensors, source="theirs", name="theirs", advice="")
    assert not report.skipped and not report.new
    images = torch.randn(2, 3, 96, 80)
    expected = theirs(images)
    torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_other_networks_are_refused():
    with torch.device("meta"):
        dense = torchvision.models.densenet121(weights=None).state_dict()
        grouped = torchvision.models.resnext50_32x4d(weights=None).state_dict()
        network = bodies.resnet50(classes=1000)
    with pytest.raises(ValueError, match="torchvision's ResNet-34, 50 or 101, found features.conv0.weight"):
        from_torchvision(dense)
    with pytest.raises(ValueError, match="FILE does not fit the network: mod2.block1.convs.conv1.weight is 128x64x1x1"):
        load_by_name(network, from_torchvision(grouped), source="", name="FILE", advice="")
