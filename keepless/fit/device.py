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


def optimizer_bytes(optimizer: str | float, values: int, size: int) -> tuple[int, int]:
    """Bytes of an optimiser's states, and temporary bytes of its step, for `values` trained weights of `size` bytes.

    `optimizer`: a name, or bytes of states per weight. ValueError: it is neither.
    """
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        states, temporary = OPTIMIZERS[optimizer]
        return states * size, temporary * size
    state_bytes: Any = optimizer if is_number(optimizer) and not isinstance(optimizer, bool) else -1  # per weight
    if not 0 <= state_bytes < math.inf:
        expected = f"{', '.join(OPTIMIZERS)}, or bytes per trained weight, such as 2.5"
        raise ValueError(f"optimizer={shown(optimizer)}: expected one of {expected}")
    return math.ceil(state_bytes * values), 0
