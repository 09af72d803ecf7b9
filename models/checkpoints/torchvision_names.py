"""State dicts of torchvision's ResNets under our names; the networks compute the same."""

import re
from collections.abc import Mapping

from torch import Tensor

_RULES = (
    (re.compile(r"^(conv1|bn1)\."), r"mod1.\1."),
    (re.compile(r"\.downsample\.0\."), ".proj_conv."),
    (re.compile(r"\.downsample\.1\."), ".proj_bn."),
    (re.compile(r"^(layer\d+\.\d+)\.(conv|bn)(\d)\."), r"\1.convs.\2\3."),
    (re.compile(r"^fc\."), "classifier.fc."),
)


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors of a torchvision ResNet the names in `models.bodies.ResNet`. The norms there need relu.

    ValueError if the state dict is not of a torchvision ResNet.
    """
    if "layer1.0.conv1.weight" not in state:
        found = ", ".join(list(state)[:3]) or "nothing"
        raise ValueError(f"expected a state dict of torchvision's ResNet-34, 50 or 101, found {found}")
    return {_renamed(name): tensor for name, tensor in state.items()}


def _renamed(name: str) -> str:
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    # Stages and blocks count from 1 and 0 there, from 2 and 1 here.
    return re.sub(r"^layer(\d+)\.(\d+)\.", lambda match: f"mod{int(match[1]) + 1}.block{int(match[2]) + 1}.", name)
