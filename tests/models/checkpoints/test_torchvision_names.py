"""State dicts of other libraries under the names of a network's features."""

import torch
from torch import nn

from models.checkpoints.torchvision_names import from_library


def net() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    return nn.ModuleDict({"blocks": features, "fc": nn.Linear(4, 9)})


def test_a_file_with_other_names_is_read_in_order_if_kinds_and_shapes_agree():
    """EfficientNet-PyTorch's names, say, for timm's network."""
    network = net()
    names = {name: tensor for name, tensor in network.state_dict().items() if name.startswith("blocks.")}
    own = {"blocks.0": "_conv", "blocks.1": "_bn", "blocks.2": "_head", "blocks.3": "_bn2", "fc": "_fc"}
    theirs = {}
    for name, tensor in net().state_dict().items():
        module, _, kind = name.rpartition(".")
        theirs[f"{own[module]}.{kind}"] = tensor + 1
    tensors, (remark,) = from_library(theirs, names)
    assert remark == "other names for 14 tensors of the same order and shapes, such as _conv.weight for blocks.0.weight"
    assert tensors.keys() == names.keys() | {"classifier._fc.weight", "classifier._fc.bias"}
    assert torch.equal(tensors["blocks.3.running_var"], theirs["_bn2.running_var"])

    uncounted = {name: tensor for name, tensor in theirs.items() if not name.endswith("tracked")}
    assert set(from_library(uncounted, names)[0]) >= {name for name in names if not name.endswith("tracked")}

    first, *others = theirs.items()
    reordered = {"_conv.weight": theirs["_conv.weight"], "_bn.bias": theirs["_bn.bias"], **dict(others)}
    for other in (dict(others), reordered, {**theirs, "_head.weight": torch.zeros(4, 4, 3, 3)}):
        tensors, remarks = from_library(other, names)
        assert not remarks and tensors.keys().isdisjoint(names)


def test_a_classifier_that_reads_more_than_the_features_is_not_taken():
    """timm's EfficientNets and MobileNets have a convolution before it, its ConvNeXts a norm."""
    state = net().state_dict()
    names = {name: tensor for name, tensor in state.items() if name.startswith("blocks.")}
    assert from_library(state, names)[0].keys() == names.keys() | {"classifier.fc.weight", "classifier.fc.bias"}
    tensors, _ = from_library({**state, "head.norm.weight": torch.ones(4)}, names)
    assert tensors.keys() - names.keys() == {
        *("classifier.last.weight", "classifier.last.bias", "classifier.head.norm.weight")
    }
