"""Measuring memory: what autograd keeps for the backward pass, and the peak of a step."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def saved_for_backward(forward: Callable[[], T]) -> tuple[T, list[Tensor]]:
    """Run a forward pass: its result, and a tensor for every storage that autograd keeps for the backward pass."""
    kept: dict[int, Tensor] = {}  # by the address of the storage, which the tensor keeps alive and so unique

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, list(kept.values())


def peak_bytes(step: Callable[[], object], device_type: str) -> int:
    """Most bytes of tensors allocated at any moment of a step, without those allocated before it."""
    if device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    # The profiler sees every allocation on the CPU, also in compiled code. Its log is not for our users.
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
