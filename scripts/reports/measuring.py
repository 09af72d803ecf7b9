"""Measure time, peak memory and operations of steps in turns; compile one, or run it in its own process."""

from engine.process.start import die_with_parent

import functools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from keepless.torch_internals import compile_within

Step = Callable[[], object]
PRECISIONS = ("float32", "bfloat16")
WARM_UP_STEPS = 3  # before a step is captured: libraries choose algorithms, and budgets get their plans
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each timer in every round. A round calls each timer once, in a new random order."""
    shuffle = random.Random(0)
    times_ms: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in shuffle.sample(list(timers), len(timers)):
            times_ms[name].append(round(timers[name](), 5))
    return times_ms


def milliseconds(step: Step, repeats: int, device: str) -> float:
    """Mean time of a step over some repeats, back to back."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start_s = time.perf_counter()
    for _ in range(repeats):
        step()
    wait()
    return 1e3 * (time.perf_counter() - start_s) / repeats


def timed(steps: Mapping[str, Step], rounds: int, device: str, sample_ms: float = 0) -> dict[str, list[float]]:
    """Milliseconds of each step in interleaved rounds, after one step of each; means over about `sample_ms` each."""
    timers: dict[str, Callable[[], float]] = {}
    for name, step in steps.items():
        repeats = max(1, round(sample_ms / milliseconds(step, 1, device)))
        timers[name] = functools.partial(milliseconds, step, repeats, device)
    return interleaved(timers, rounds)


def operations_of(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Context of one of `PRECISIONS`. Inside of a CUDA graph, weights are cast again in every replay."""
    is_captured = device_type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.autocast(device_type, torch.bfloat16, precision == "bfloat16", cache_enabled=not is_captured)


def captured(step: Step, device: str) -> Step:
    """Replays a step as a CUDA graph. On a CPU, where a rehearsal runs, it is the step itself.

    Graphs share their memory: none may use what another has computed.
    """
    if device != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(), stream=stream):
        step()

    def replay(_: Step = step) -> None:  # keeps the tensors that the graph reads: the next capture unmaps freed memory
        graph.replay()

    return replay


@functools.cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


def compiled(block: nn.Module, compiler: str, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile a block with torch.compile, for static shapes and as one graph.

    A budget below 1 refuses blocks that draw random numbers: see `compile_within`.
    """
    # The memory budget is a global setting: the compiler sees it for this graph only.
    backend = functools.partial(compile_within, compiler=compiler, budget=budget)
    return torch.compile(block, fullgraph=True, dynamic=False, backend=backend)


def process(prepare: Callable[..., object], *arguments: object) -> ProcessPoolExecutor:
    """A process for measurements, which first calls `prepare(*arguments)`. It ends with this one, however that ends."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(prepare, arguments))


def _begin(prepare: Callable[..., object], arguments: tuple) -> None:
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it has ended while this process started
        os._exit(1)
    prepare(*arguments)
