"""Compare state dicts in tests."""

from collections.abc import Mapping

import torch
from torch import Tensor


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names, and tensors equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_counts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without `num_batches_tracked`, which released files lack."""
    return {name: tensor for name, tensor in state.items() if "num_batches" not in name}
