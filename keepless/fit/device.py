"""A device's memory: what is left for a step's tensors, and what an optimiser takes of it."""

import math

from ..units import UNITS, bytes_of

# The largest with which every row of the in-place ABN paper's Table 3 still fits into 12 GB; not measured.
CONTEXT = "0.5GiB"  # of CUDA, cuDNN and cuBLAS, outside PyTorch's allocator
WORKSPACE = "0.7GiB"  # of convolutions, chosen by cuDNN's benchmark
FRAGMENTATION = 0.05  # share of the rest that stays unused

# Bytes for each byte of a trained parameter: its states, and what a step on all parameters at once takes while it runs.
OPTIMIZERS = {"none": (0, 0), "sgd": (0, 1), "momentum": (1, 1), "adam": (2, 1), "adamw": (2, 1)}


def bytes_for_tensors(device: int | str) -> int:
    """What a device leaves, e.g. one of "12GiB". ValueError: that is no number of bytes, or leaves nothing."""
    memory = bytes_of(device) if isinstance(device, str) else device
    left = 0 if memory is None else memory - (bytes_of(CONTEXT) or 0) - (bytes_of(WORKSPACE) or 0)
    if left <= 0:
        raise ValueError(
            f"device={device!r}: expected its memory, such as '12GiB' ({', '.join(UNITS)}), of which CUDA takes "
            f"{CONTEXT} and convolutions {WORKSPACE}"
        )
    return int(left * (1 - FRAGMENTATION))


def optimizer_bytes(optimizer: str | float, values: int, size: int) -> tuple[int, int]:
    """An optimiser's states, and what its step takes besides, for so many trained values of so many bytes.

    `optimizer`: a name, or bytes of states for each value. ValueError: it is neither.
    """
    if isinstance(optimizer, (int, float)) and optimizer >= 0:
        return math.ceil(optimizer * values), 0
    if optimizer not in OPTIMIZERS:
        expected = f"{', '.join(OPTIMIZERS)}, or bytes for each trained value, such as 2.5"
        raise ValueError(f"optimizer={optimizer!r}: expected one of {expected}")
    states, temporary = OPTIMIZERS[str(optimizer)]
    return states * size, temporary * size
