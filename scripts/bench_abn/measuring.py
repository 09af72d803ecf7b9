"""Time of one forward and backward pass, and the bytes that it keeps in between."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scripts.memory_measurement import saved_for_backward

Step = Callable[[], object]


class Work(NamedTuple):
    """A block and what its forward and backward pass need; `step` is what is timed."""

    block: nn.Module
    forward: Callable[[Tensor], Tensor]  # the block, or what a compiler made of it
    x: Tensor  # requires a gradient, except images
    dz: Tensor  # like the block's output
    overwrites: bool = False  # the block writes over its input, and is given a copy

    def step(self) -> tuple[Tensor, ...]:
        """The gradients of x and of all parameters."""
        return self._gradients(self.forward(self.x.clone() if self.overwrites else self.x))

    def owning_step(self) -> tuple[Tensor, ...]:
        """`step` for an x that nobody else holds, as in a network: its memory is free once it is not needed."""
        return self._gradients(self.forward(self.x.clone()))

    def _gradients(self, output: Tensor) -> tuple[Tensor, ...]:
        wanted = [tensor for tensor in (self.x, *self.block.parameters()) if tensor.requires_grad]
        return torch.autograd.grad(output, wanted, self.dz)

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that autograd keeps, parameters aside: of all tensors, and of those with up to C values.

        x counts where it is kept, as it then lives on because of it; images do not: the caller holds them.
        """
        _, saved = saved_for_backward(lambda: self.forward(self.x.clone() if self.overwrites else self.x))
        held = {tensor.untyped_storage()._cdata for tensor in self.block.parameters()}
        if not self.x.requires_grad:
            held.add(self.x.untyped_storage()._cdata)
        storages = [t.untyped_storage() for t in saved if t.untyped_storage()._cdata not in held]
        vector = self.x.shape[1] * torch.float32.itemsize
        return sum(s.nbytes() for s in storages), sum(s.nbytes() for s in storages if s.nbytes() <= vector)


def captured(step: Step) -> Step:
    """A step recorded as a CUDA graph: its replay is the device's work without the time it takes to launch it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step: Step, repeats: int, device: str) -> float:
    """Mean time of a step over some repeats, one right after the other."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats
    start_s = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1e3 * (time.perf_counter() - start_s) / repeats


def interleaved(steps: dict[str, Step], rounds: int, sample_ms: float, device: str) -> dict[str, list[float]]:
    """Milliseconds of each step in every round. A round times all of them once, each in a new random order.

    One time is the mean over as many repeats as take `sample_ms`.
    """
    repeats = {}
    for name, step in steps.items():
        milliseconds(step, 2, device)
        repeats[name] = max(1, round(sample_ms / milliseconds(step, 2, device)))
    shuffle = random.Random(0)
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            times[name].append(milliseconds(steps[name], repeats[name], device))
    return times
