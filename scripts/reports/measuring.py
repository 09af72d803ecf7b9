"""Measure time, peak memory and operations of steps in turns; run one compiled, or in a process of its own."""

import functools
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from datasets.workers import die_with_parent
from keepless.recompute.costs import peak_bytes as peak_of_step
from keepless.torch_internals import compile_within

Step = Callable[[], object]
PRECISIONS = ("float32", "bfloat16")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def interleaved(timers: Mapping[str, Callable[[int], float | None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each timer in every round. A round calls each timer once with its number, in a new random order.

    A timer may return None to skip a round.
    """
    shuffle = random.Random(0)
    times_ms: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(rounds):
        for name in shuffle.sample(list(timers), len(timers)):
            ms = timers[name](number)
            if ms is not None:
                times_ms[name].append(round(ms, 5))
    return times_ms


def timer(step: Step, sample_ms: float, device: str) -> Callable[[int], float]:
    """A timer for `interleaved`: the mean over enough repeats to take about `sample_ms`."""
    milliseconds(step, 2, device)
    repeats = max(1, round(sample_ms / milliseconds(step, 2, device)))
    return lambda _: milliseconds(step, repeats, device)


def milliseconds(step: Step, repeats: int, device: str) -> float:
    """Mean time of a step over some repeats, back to back."""
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


def timed(steps: Mapping[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each step in interleaved rounds, after one step of each."""
    for step in steps.values():
        step()
    timers = {name: lambda _, step=step: milliseconds(step, 1, device) for name, step in steps.items()}
    return interleaved(timers, rounds)


def peak_bytes(step: Callable[[], object], device_type: str, network: nn.Module | None = None) -> int:
    """Largest number of bytes of tensors allocated at any moment of a step, beyond those allocated before it.

    Gradients of the network's parameters count: earlier ones are dropped first, or freeing them would be subtracted.
    """
    if network is not None:
        network.zero_grad()
    return peak_of_step(step, device_type)


def operations_of(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Context of one of `PRECISIONS`."""
    return torch.autocast(device_type, torch.bfloat16, enabled=precision == "bfloat16")


def compiled(block: nn.Module, compiler: str, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile a block with torch.compile, for static shapes and as one graph."""
    # The memory budget is a global setting: the compiler sees it for this graph only.
    backend = functools.partial(compile_within, compiler=compiler, budget=budget)
    return torch.compile(block, fullgraph=True, dynamic=False, backend=backend)


class Elsewhere:
    """`make(*arguments)` in a new process; `call` calls its methods there. A context manager: the process ends with it.

    It also ends if this process is killed, even in the middle of a call.
    `make` is pickled by name, so it must be defined at the top of a module. If it fails, every call raises its error.
    """

    def __init__(self, make: Callable[..., object], *arguments: object):
        self.process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.made = self.process.submit(_make, make, arguments)

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.shutdown()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result. Raises its error, or BrokenProcessPool if the process has died."""
        self.made.result()
        return self.process.submit(_call, method, arguments).result()


_made: list[object] = []  # the one object of this process


def _make(make: Callable[..., object], arguments: tuple) -> None:
    die_with_parent(signal.SIGKILL)
    _made.append(make(*arguments))


def _call(method: str, arguments: tuple) -> Any:
    return getattr(_made[0], method)(*arguments)
