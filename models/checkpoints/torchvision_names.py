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


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors of a ResNet, ResNeXt or DenseNet the names in `models.bodies`, whose norms then need relu.

    ValueError if the state dict is not of such a network of torchvision or timm.
    """
    resnet, densenet = ("layer1.0.conv1.weight" in state, "features.conv0.weight" in state)
    if not resnet and not densenet:
        found = ", ".join(list(state)[:3]) or "nothing"
        raise ValueError(f"expected a state dict of a ResNet, ResNeXt or DenseNet, found {found}")
    tensors = dict(state)
    for pattern, replacement in _RESNET if resnet else _DENSENET:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def from_library(
    state: Mapping[str, Tensor], names: Mapping[str, Tensor], left_out: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Give a network's tensors the names of its features, `names`; all others become `classifier`.

    So do the parts `left_out`. The last layer becomes `classifier.fc` if no other layer lies between the features and
    it. Another program's names for the same network are matched by order: its tensors are used if each has the same
    kind (the last part of its name) and shape, and a remark says so. Returns the tensors and remarks.
    """
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
    if renamed.keys().isdisjoint(names) and (pairs := _in_order(state, names)):
        others = {f"classifier.{name}": tensor for name, tensor in state.items() if name not in pairs.values()}
        first, there = next(iter(pairs.items()))
        remark = f"other names for {len(pairs)} tensors of the same order and shapes, such as {there} for {first}"
        return {ours: state[theirs] for ours, theirs in pairs.items()} | others, (remark,)
    return renamed, ()


def _in_order(state: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, str]:
    """The network's name -> the file's, if the file begins with tensors of the same kinds and shapes; else nothing."""
    counted = any(name.endswith("num_batches_tracked") for name in state)  # older programs saved none
    ours = [name for name in names if counted or not name.endswith("num_batches_tracked")]
    theirs = list(state)[: len(ours)]
    kinds = [
        [(name.rpartition(".")[2], tuple(tensors[name].shape)) for name in each]
        for each, tensors in ((ours, names), (theirs, state))
    ]
    return dict(zip(ours, theirs, strict=True)) if kinds[0] == kinds[1] else {}
