"""State dicts of torchvision and timm under our names, and under the names in their own feature networks."""

import re
from collections.abc import Mapping

from torch import Tensor

# The norm and convolution of a layer had other names when torchvision published its DenseNets.
_OLD = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
# First parts of names, below any prefix, such as the `backbone.` of a segmentation network.
PARTS = {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "features"}
# Stages and blocks count from 1 and 0 there (layers of DenseNets from 1), from 2, 1 and 0 here.
_RESNET = (
    (r"^(conv1|bn1)\.", r"mod1.\1."),
    (r"\.downsample\.0\.", ".proj_conv."),
    (r"\.downsample\.1\.", ".proj_bn."),
    (r"^(layer\d+\.\d+)\.(conv|bn)(\d)\.", r"\1.convs.\2\3."),
    (r"^fc\.", "classifier.fc."),
    (r"^layer(\d+)\.(\d+)\.", lambda match: f"mod{int(match[1]) + 1}.block{int(match[2]) + 1}."),
)
_DENSENET = (
    (_OLD, r"\1"),
    (r"^features\.(conv|norm)0\.", r"mod1.\g<1>1."),
    (r"^features\.norm5\.", "bn_out."),
    (r"^features\.transition(\d)\.", lambda match: f"tra{int(match[1]) + 1}."),
    (r"^features\.denseblock(\d)\.", lambda match: f"mod{int(match[1]) + 1}."),
    (r"\.denselayer(\d+)\.(\w+)1\.", lambda match: f".convs1.{int(match[1]) - 1}.{match[2]}."),
    (r"\.denselayer(\d+)\.(\w+)2\.", lambda match: f".convs3.{int(match[1]) - 1}.{match[2]}."),
    (r"\.norm(1?)\.", r".bn\1."),
    (r"^classifier\.", "classifier.fc."),
)
# The layers of the package EfficientNet-PyTorch, and timm's: the stem, blocks without and with an expansion.
_STEM = {"_conv_stem": "conv_stem", "_bn0": "bn1"}
_SQUEEZE = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
_SEPARABLE = _SQUEEZE | {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_INVERTED = _SQUEEZE | {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
_INVERTED |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors of a ResNet, ResNeXt or DenseNet the names in `models.bodies`, whose norms then need relu.

    ValueError if the state dict is not of such a network of torchvision or timm.
    """
    is_resnet = "layer1.0.conv1.weight" in state
    is_densenet = "features.conv0.weight" in state
    if not is_resnet and not is_densenet:
        actual = ", ".join(list(state)[:3]) or "nothing"
        raise ValueError(f"expected a state dict of a ResNet, ResNeXt or DenseNet, found {actual}")
    tensors = dict(state)
    for pattern, replacement in _RESNET if is_resnet else _DENSENET:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def resnet_depth(state: Mapping[str, Tensor]) -> int | None:
    """The depth in the name of a ResNet of torchvision's, such as 18; None if it has groups, or another width."""
    first = state.get("layer1.0.conv2.weight")
    if first is None or first.shape != (64, 64, 3, 3):
        return None
    return 2 + sum(re.fullmatch(r"layer\d\.\d+\.conv\d\.weight", name) is not None for name in state)


def from_library(
    state: Mapping[str, Tensor], names: Mapping[str, Tensor], left_out: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Give a network's tensors the names of its features, `names`; all others become `classifier`.

    So do the parts `left_out`. The last layer becomes `classifier.fc` if no other layer lies between the features and
    it. The names of EfficientNet-PyTorch become timm's. Returns the tensors and remarks.
    """
    remarks: tuple[str, ...] = ()
    if "_conv_stem.weight" in state:
        state = _from_efficientnet_pytorch(state, names)
        remarks = ("names of EfficientNet-PyTorch",)
    parts = {name.partition(".")[0] for name in names}
    renamed = {}
    for name, tensor in state.items():
        name = _OLD.sub(r"\1", name)
        flattened = name.replace(".", "_", 1)  # as timm names the stages of its features
        if re.fullmatch(r"(fc|head|classifier|head\.fc|classifier\.1)\.(weight|bias)", name):
            name = f"classifier.fc.{name.rpartition('.')[2]}"
        elif name.startswith(tuple(f"{part}." for part in left_out)):
            name = f"classifier.{name}"
        elif flattened.partition(".")[0] in parts:
            name = flattened
        elif name.partition(".")[0] not in parts:
            name = f"classifier.{name}"
        renamed[name] = tensor
    if any(name.startswith("classifier.") and not name.startswith("classifier.fc.") for name in renamed):
        renamed = {name.replace("classifier.fc.", "classifier.last.", 1): tensor for name, tensor in renamed.items()}
    return renamed, remarks


def _from_efficientnet_pytorch(state: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors of EfficientNet-PyTorch, which numbers the blocks of all stages, timm's names."""
    blocks = list(dict.fromkeys(".".join(name.split(".")[:3]) for name in names if name.startswith("blocks.")))
    renamed = {}
    for name, tensor in state.items():
        path, _, kind = name.rpartition(".")
        block, _, layer = path.rpartition(".")
        number = int(re.sub(r"\D", "", block) or 0)
        if not block and layer in _STEM:
            name = f"{_STEM[layer]}.{kind}"
        elif block == f"_blocks.{number}" and number < len(blocks):
            layers = _INVERTED if f"{block}._expand_conv.weight" in state else _SEPARABLE
            name = f"{blocks[number]}.{layers.get(layer, layer)}.{kind}"
        renamed[name] = tensor
    return renamed
