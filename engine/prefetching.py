"""Copies minibatches to the device before they are needed."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def prefetched(minibatches: Iterable[dict], device: torch.device) -> Iterator[dict]:
    """Move the minibatches' tensors to `device`; on CUDA the next copy overlaps with the current minibatch."""
    if device.type != "cuda":
        yield from minibatches
        return
    stream, under_way = torch.cuda.Stream(device), None
    for minibatch in minibatches:
        with torch.cuda.stream(stream):
            copied = {
                key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in minibatch.items()
            }
            before, under_way = under_way, (copied, stream.record_event())
        if before is not None:
            yield _arrived(*before)
    if under_way is not None:
        yield _arrived(*under_way)


def _arrived(minibatch: dict, copied: torch.cuda.Event) -> dict:
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for value in minibatch.values():
        if isinstance(value, Tensor):
            value.record_stream(current)  # keeps its memory until the current stream is done with it
    return minibatch


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from CPU memory without waiting for the device."""
    return values.to(device, non_blocking=True)
