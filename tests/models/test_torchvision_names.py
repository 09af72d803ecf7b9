"""The tensors of torchvision's ResNets under our names; `bodies/test_resnet.py` compares what they compute."""

import pytest
import torch
import torchvision

from models import bodies
from models.loading import load_by_name
from models.torchvision_names import from_torchvision


@pytest.mark.parametrize("name", ["resnet34", "resnet50", "resnet101"])
def test_names_and_shapes_are_ours(name):
    with torch.device("meta"):
        theirs, ours = getattr(torchvision.models, name)(weights=None), getattr(bodies, name)(classes=1000)
    found = {name: tensor.shape for name, tensor in from_torchvision(theirs.state_dict()).items()}
    assert found == {name: tensor.shape for name, tensor in ours.state_dict().items()}


def test_other_networks_are_refused():
    with torch.device("meta"):
        dense = torchvision.models.densenet121(weights=None).state_dict()
        grouped = torchvision.models.resnext50_32x4d(weights=None).state_dict()
        network = bodies.resnet50(classes=1000)
    with pytest.raises(ValueError, match="torchvision's ResNet-34, 50 or 101, found features.conv0.weight"):
        from_torchvision(dense)
    with pytest.raises(ValueError, match="FILE does not fit the network: mod2.block1.convs.conv1.weight is 128x64x1x1"):
        load_by_name(network, from_torchvision(grouped), source="", name="FILE", advice="")
