"""Weights of the released `inplace_abn`, whose in-place norms scale by |weight| + eps: conversion, and a warning."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..torch_internals import warn

CONVERTED = "from_released"  # marks converted norms in a state dict's metadata


def from_released(state_dict: Mapping[str, Tensor], eps: float = 1e-5) -> dict[str, Tensor]:
    """Convert a state dict of the released package: each norm's weight w becomes |w| + eps, its actual scale.

    A norm is recognised by its running_mean. Norms with num_batches_tracked, which the release lacks, are not changed
    (e.g. PyTorch's, in the same network). Do not convert networks of the release's plain `ABN`, whose scale is w.

    The returned copy shares all other tensors. It is marked as converted in its metadata, which `torch.save` keeps, so
    loading it does not warn. Rename keys before the conversion, because a new dict has no metadata.

    Args:
        state_dict: of a network or a part of it, with any prefix. It is not changed.
        eps: the eps of the released layers.
    """
    converted = OrderedDict(state_dict)
    metadata = copy.deepcopy(getattr(state_dict, "_metadata", {}))
    for name in state_dict:
        prefix = name.removesuffix("running_mean")
        if f".{name}".endswith(".running_mean") and is_released(state_dict, prefix, metadata.get(prefix[:-1], {})):
            converted[prefix + "weight"] = state_dict[prefix + "weight"].detach().abs() + eps
            metadata.setdefault(prefix[:-1], {})[CONVERTED] = True
    converted._metadata = metadata  # type: ignore[attr-defined]  # as in nn.Module.state_dict
    return converted


class _LastWarning:
    """The list of missing keys of the last load that warned. All layers of a load share this list."""

    missing_keys: list[str] | None = None


def warn_if_released(
    state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], missing_keys: list[str]
) -> None:
    """Warn once per `load_state_dict` if a norm's entries look like the release's. Arguments as for PyTorch's hook."""
    if missing_keys is _LastWarning.missing_keys or not is_released(state_dict, prefix, metadata):
        return
    _LastWarning.missing_keys = missing_keys
    warn(
        f"the state dict has no num_batches_tracked for {prefix[:-1] or '(the module itself)'}, like one of the "
        f"released package inplace_abn. Its in-place layers scale by |weight| + eps; here, the scale is weight. "
        f"If the weights come from that package, load from_released(state_dict, eps=1e-5) instead. Standard "
        f"batch normalisation saved before PyTorch 0.4.1 needs no conversion"
    )


def is_released(state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a norm has a scale and statistics but no count, and is not marked as converted."""
    names = {name for name in ("weight", "running_mean", "num_batches_tracked") if prefix + name in state_dict}
    return names == {"weight", "running_mean"} and CONVERTED not in metadata
