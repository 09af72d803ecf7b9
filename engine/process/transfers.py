"""Asynchronous copies between host and device."""

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


def prefetched(minibatches: Iterable[dict], device: torch.device) -> Iterator[dict]:
    """The minibatches, on CUDA with their tensors copied to `device`: the next copy overlaps the current minibatch.

    On the CPU they are as they come.
    """
    if device.type != "cuda":
        yield from minibatches
        return
    stream = _copying_stream(device)
    previous = None
    for minibatch in minibatches:
        with torch.cuda.stream(stream):
            copied = {
                key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in minibatch.items()
            }
            started = copied, stream.record_event()
        if previous is not None:
            yield _synchronised(*previous)
        previous = started
    if previous is not None:
        yield _synchronised(*previous)


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies: PyTorch's allocator keeps freed memory for the stream that allocated it."""
    return torch.cuda.Stream(device)


def _synchronised(minibatch: dict, end_of_copy: torch.cuda.Event) -> dict:
    """A copied minibatch, for use on the current stream, which waits for the end of the copy."""
    current = torch.cuda.current_stream()
    current.wait_event(end_of_copy)
    for value in minibatch.values():
        if isinstance(value, Tensor):
            value.record_stream(current)  # keeps its memory until the current stream is done with it
    return minibatch


class HostCopy:
    """A CPU copy of all tensors in nested dictionaries, lists and tuples, with their present values.

    Copies from a device only start here; `wait`, in any thread, returns them when they are complete.
    """

    def __init__(self, state: Any):
        self._devices: set[torch.device] = set()
        self._copied = self._copy(state)
        self._started = {device: torch.cuda.current_stream(device).record_event() for device in self._devices}

    def wait(self) -> Any:
        """The copy, once it is complete."""
        for event in self._started.values():
            event.synchronize()
        return self._copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_cuda:
                self._devices.add(value.device)
            return value.detach().to("cpu", non_blocking=True, copy=True)  # from a device: into pinned memory
        if isinstance(value, dict):
            copied = copy.copy(value)  # state dicts have attributes
            copied.update((key, self._copy(nested)) for key, nested in value.items())
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._copy, value))
        return value
