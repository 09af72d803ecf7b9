"""Copies of tensors on the host, made while the host goes on."""

import copy
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy, on the CPU, of all tensors in nested dictionaries, lists and tuples, as they are now.

    Copies from a device are only started: `wait` returns them, in any thread.
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
            copied.update((key, self._copy(each)) for key, each in value.items())
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._copy, value))
        return value
