"""State dicts of the released package `inplace_abn`: the same names as here, but a different scale."""

import copy
from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from ..norms.load_warning import CONVERTED, is_released


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
