"""Recognise weights of the released `inplace_abn`, whose norms scale by |weight| + eps, while they are loaded."""

from collections.abc import Mapping
from typing import Any

from ..torch_internals import warn

CONVERTED = "from_released"  # marks converted norms in a state dict's metadata


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
