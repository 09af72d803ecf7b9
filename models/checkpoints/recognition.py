"""Recognise a network by the names and shapes of its tensors."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Architecture(NamedTuple):
    """A body and its classifier. Plain and A2 WideResNets have the same tensors, so they are not told apart."""

    kind: str  # "resnet", "resnext", "densenet" or "wider_resnet"
    options: dict[str, Any]  # arguments of the body: structure, channels, stem, …
    classes: int  # of the classifier; 0 without one

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in self.options.items())})"


def architecture_of(tensors: Mapping[str, Tensor]) -> Architecture:
    """The architecture of a body whose tensors have the released names without a prefix, e.g. on the meta device.

    ValueError if no body of `models.bodies` has these tensors.
    """
    stem = tensors.get("mod1.conv1.weight")
    structure = _blocks_per_stage(tensors)
    if stem is None or stem.ndim != 4 or not structure:
        actual = ", ".join(list(tensors)[:3]) or "nothing"
        raise ValueError(f"expected tensors such as mod1.conv1.weight and mod2.…, found {actual}")
    fc = tensors.get("classifier.fc.weight")
    try:
        kind, body_options = _kind_and_options(tensors)
        classes = 0 if fc is None else len(fc)
    except KeyError as error:
        raise ValueError(f"no body has its tensors ({error} is missing)") from error
    except (IndexError, TypeError, ZeroDivisionError) as error:  # TypeError: a number has no length
        raise ValueError("no body has its tensors (a weight has an odd shape)") from error
    options = {"structure": structure, "stem_channels": len(stem), **body_options}
    return Architecture(kind, options, classes)


def body_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the body, without a prefix; with the classifier of whole images, if there is one."""
    if not any(name.startswith("body.") for name in tensors):
        return dict(tensors)
    return {name.removeprefix("body."): tensor for name, tensor in tensors.items() if name.startswith("body.")}


def _blocks_per_stage(tensors: Mapping[str, Tensor]) -> list[int]:
    """How many blocks, or dense layers, mod2, mod3, … have."""
    matches = (re.match(r"(mod[2-9])\.(block\d+|convs1\.\d+)\.", name) for name in tensors)
    blocks = {match.groups() for match in matches if match}  # ("mod2", "block1"), …
    counts = Counter(stage for stage, _ in blocks)
    return [counts[stage] for stage in sorted(counts)]


def _kind_and_options(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The body's kind and arguments, but for structure and stem_channels. Fails if a tensor is missing or odd."""
    if "mod7.block1.convs.conv1.weight" in tensors:
        return "wider_resnet", {"channels": [_widths(tensors, f"mod{stage}.block1") for stage in range(2, 8)]}
    stem = _stem(tensors)
    if "mod2.convs3.0.conv.weight" in tensors:
        last_norm = "mod1.bn3" if stem == "3x3" else "mod1.bn1"
        growth = len(tensors["mod2.convs3.0.conv.weight"])
        return "densenet", {"growth": growth, "stem_norm": f"{last_norm}.running_mean" in tensors, "stem": stem}
    widths = _widths(tensors, "mod2.block1")
    grouped = tensors["mod2.block1.convs.conv2.weight"]  # (middle, first / groups, 3, 3)
    options = {"base_channels": widths, "stem": stem, "groups": widths[0] // grouped.shape[1]}
    is_preactivation = "bn_out.running_mean" in tensors  # only these networks end in a norm
    return "resnext" if is_preactivation else "resnet", options


def _stem(tensors: Mapping[str, Tensor]) -> str:
    if "mod1.conv3.weight" in tensors:
        return "3x3"
    return "7x7" if tensors["mod1.conv1.weight"].shape[-1] == 7 else "cifar"


def _widths(tensors: Mapping[str, Tensor], block: str) -> list[int]:
    """Output channels of a block's two or three convolutions."""
    names = [f"{block}.convs.conv{number}.weight" for number in (1, 2, 3)]
    return [len(tensors[name]) for name in names if name != names[2] or name in tensors]
