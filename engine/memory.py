"""Memory of training: what autograd keeps, and the peak."""

import ctypes
import resource
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def saved_for_backward(forward: Callable[[], T]) -> tuple[T, list[Tensor]]:
    """Run a forward pass. Its result, and what autograd keeps for the backward pass: a tensor for every storage."""
    kept: dict[int, Tensor] = {}  # by the address of the storage; the tensor keeps it alive, so none is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, list(kept.values())


def peak_memory_mib(device: torch.device) -> float:
    """MiB at the peak: of tensors on a CUDA device since `reset_peak_memory`; of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak where the device can; the CPU's peak is that of the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory of this process for its next allocation, as CUDA's caching allocator does.

    By default glibc hands large buffers back to the system when they are freed and takes new ones page by page, which
    can cost several times what computing their values does, or nothing, depending on what lies beside them in memory.

    Returns:
        Whether the C library could be told (glibc only).
    """
    trim_threshold, mmap_max = -1, -4  # from malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
    except (OSError, AttributeError):
        return False
