"""Time that a step waits for data and for the other ranks. The slowest rank shows the shortest wait."""

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class DataWait:
    """Iterates over minibatches. `seconds`: how long the last one took to arrive."""

    def __init__(self, minibatches: Iterable[dict]):
        self.minibatches = minibatches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[dict]:
        minibatches = iter(self.minibatches)
        while True:
            started = time.perf_counter()
            minibatch = next(minibatches, None)
            self.seconds = time.perf_counter() - started
            if minibatch is None:
                return
            yield minibatch


class GradientExchange:
    """Times the end of a backward pass: from this rank's last gradient until all ranks' gradients are averaged.

    On CUDA the times are events in the stream, so the host does not wait.
    """

    def __init__(self, network: nn.Module, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.times: list = [None, None]  # events, or seconds
        first = next(parameter for parameter in network.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(self._last_gradient)  # the backward pass ends at the first layer

    def _last_gradient(self, parameter: Tensor) -> None:
        self.times[0] = self._now()

    def ended(self) -> None:
        self.times[1] = self._now()

    @property
    def seconds(self) -> float:
        """Duration for the last backward pass, which the device must have finished."""
        begin, end = self.times
        if begin is None:
            return 0.0
        return begin.elapsed_time(end) / 1e3 if self.on_cuda else end - begin

    def _now(self) -> "torch.cuda.Event | float":
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
