"""A device's memory: how much is left for a step's tensors, and how much an optimiser takes."""

import math
from typing import Any

from ..inputs import is_number, shown
from ..units import UNITS, bytes_of

# The largest values with which every row of the in-place ABN paper's Table 3 still fits in 12 GB; not measured.
CONTEXT = "0.5GiB"  # of CUDA, cuDNN and cuBLAS, outside PyTorch's allocator
WORKSPACE = "0.7GiB"  # of convolutions, chosen by cuDNN's benchmark
FRAGMENTATION = 0.05  # share of the rest that stays unused

# Per byte of trained parameters: bytes of states, and temporary bytes of a step on all parameters at once.
OPTIMIZERS = {"none": (0, 0), "sgd": (0, 1), "momentum": (1, 1), "adam": (2, 1), "adamw": (2, 1)}


def bytes_for_tensors(memory: int | str) -> int:
    """Bytes that a device of this memory, e.g. "12GiB", leaves for tensors. ValueError: no size, or nothing is left."""
    device_bytes: Any = bytes_of(memory) if isinstance(memory, str) else memory
    left = device_bytes - (bytes_of(CONTEXT) or 0) - (bytes_of(WORKSPACE) or 0) if is_number(device_bytes) else 0
    if not 0 < left < math.inf:
        raise ValueError(
            f"memory={shown(memory)}: expected a device's memory, such as '12GiB' ({', '.join(UNITS)}), of which CUDA "
            f"takes {CONTEXT} and convolutions {WORKSPACE}"
        )
    return int(left * (1 - FRAGMENTATION))


def check_optimizer(optimizer: str | float) -> None:
    """Raise ValueError if this is neither the name of an optimiser nor the bytes of its states per weight."""
    if isinstance(optimizer, str):
        is_known = optimizer in OPTIMIZERS
    else:
        is_known = is_number(optimizer) and not isinstance(optimizer, bool) and 0 <= optimizer < math.inf
    if not is_known:
        expected = f"{', '.join(OPTIMIZERS)}, or bytes per trained weight, such as 2.5"
        raise ValueError(f"optimizer={shown(optimizer)}: expected one of {expected}")


def optimizer_bytes(optimizer: str | float, value_count: int, size: int) -> tuple[int, int]:
    """Bytes of an optimiser's states, and temporary bytes of its step, for trained weights of `size` bytes.

    `optimizer`: a name, or bytes of states for each of the `value_count` weights.
    """
    if isinstance(optimizer, str):
        states, temporary = OPTIMIZERS[optimizer]
        return states * size, temporary * size
    return math.ceil(optimizer * value_count), 0
