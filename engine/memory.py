"""Memory of training: what autograd keeps, and the peak."""

import ctypes
import os
import resource
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from models.layers import InPlaceABN

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


def peak_bytes(step: Callable[[], object], device_type: str) -> int:
    """Most bytes of tensors allocated at any moment of a step, beyond those that were there before it."""
    if device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    # The profiler hears of every allocation on the CPU, also those of compiled code. Its log is not for our users.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_memory_mib(device: torch.device) -> float:
    """MiB at the peak: of tensors on a CUDA device since `reset_peak_memory`; of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak where the device can; the CPU's peak is that of the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: on a CUDA device, of PyTorch or of CUDA's own libraries, or in the CPU's memory."""
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def out_of_memory(shape: tuple[int, ...], accumulation_steps: int, network: nn.Module, least_share: int) -> str:
    """What to say when a training step has not found enough memory, and what would about halve what it needs.

    `shape`: (N, 3, H, W) of this process's share of a minibatch; `accumulation_steps`: the parts it passes in;
    `least_share`: crops of the process with the fewest.
    """
    crops, (height, width) = shape[0], shape[-2:]
    at_a_time = -(-crops // accumulation_steps)
    ways = []
    if least_share // (2 * accumulation_steps) >= 2:  # else config.check_shares refuses them
        ways += [f"trainer.accumulation_steps={2 * accumulation_steps}", "twice as many processes"]
    ways.append(f"data.crop_size={int(min(height, width) / 2**0.5)}")
    if not any(isinstance(module, InPlaceABN) for module in network.modules()):
        ways.append("norm=inplace")
    ways.append("trainer.precision=bfloat16, where it is not used yet")
    return (
        f"out of memory with {at_a_time} crops of {height}x{width} pixels at a time on this device "
        f"(data.crops_per_minibatch over processes and trainer.accumulation_steps={accumulation_steps}). Each of these "
        f"takes about half of what grows with the crops: {'; '.join(ways)}"
    )


def out_of_memory_evaluating(shape: tuple[int, ...]) -> str:
    """What to say when an image, `shape` (N, 3, H, W), could not be evaluated for want of memory."""
    return (
        f"out of memory while an image of {shape[-2]}x{shape[-1]} pixels was evaluated. eval.py and scripts.predict "
        f"need less with window.size=1024 or smaller, also for the checkpoints of a training that stops here; a "
        f"training itself with a smaller data.base_size, or trainer.precision=bfloat16 where it is not used yet"
    )


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
