"""State dicts of other libraries under the names of a network's features."""

import torch
from torch import nn

from models.checkpoints.torchvision_names import from_library


def test_names_of_efficientnet_pytorch_become_timm_s_and_other_names_are_not_guessed():
    """EfficientNet-PyTorch numbers blocks through all stages; blocks behind the body's last part are left over."""
    pairs = {
        "_conv_stem.weight": "conv_stem.weight",
        "_bn0.bias": "bn1.bias",
        "_blocks.0._depthwise_conv.weight": "blocks.0.0.conv_dw.weight",
        "_blocks.0._bn2.running_var": "blocks.0.0.bn2.running_var",
        "_blocks.1._expand_conv.weight": "blocks.1.0.conv_pw.weight",
        "_blocks.1._bn1.weight": "blocks.1.0.bn2.weight",
        "_blocks.1._se_reduce.bias": "blocks.1.0.se.conv_reduce.bias",
        "_blocks.2._project_conv.weight": "blocks.1.1.conv_pwl.weight",
        "_blocks.2._expand_conv.weight": "blocks.1.1.conv_pw.weight",
        "_blocks.3._bn1.weight": "classifier._blocks.3._bn1.weight",
        "_bn1.bias": "classifier._bn1.bias",
        "_fc.weight": "classifier._fc.weight",
    }
    tensors_of_file = {name: torch.full((2,), float(number)) for number, name in enumerate(pairs)}
    names = {name: torch.zeros(2) for name in pairs.values() if not name.startswith("classifier.")}
    tensors, (remark,) = from_library(tensors_of_file, names)
    assert remark == "names of EfficientNet-PyTorch"
    assert tensors == {ours: tensors_of_file[name] for name, ours in pairs.items()}
    same_shapes = {f"other_{name}": tensor for name, tensor in names.items()}
    tensors, remarks = from_library(same_shapes, names)
    assert not remarks and tensors.keys().isdisjoint(names)


def test_a_classifier_that_reads_more_than_the_features_is_not_taken():
    """timm's EfficientNets and MobileNets have a convolution before it, its ConvNeXts a norm."""
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    state = nn.ModuleDict({"blocks": features, "fc": nn.Linear(4, 9)}).state_dict()
    names = {name: tensor for name, tensor in state.items() if name.startswith("blocks.")}
    assert from_library(state, names)[0].keys() == names.keys() | {"classifier.fc.weight", "classifier.fc.bias"}
    tensors, _ = from_library({**state, "head.norm.weight": torch.ones(4)}, names)
    last = {"classifier.last.weight", "classifier.last.bias", "classifier.head.norm.weight"}
    assert tensors.keys() - names.keys() == last
