"""Measure times and operations of steps; capture a step as a CUDA graph, or run it in a process."""

from engine.process.start import die_with_parent

import functools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.rows import Rows

Step = Callable[[], object]
PRECISIONS = ("float32", "bfloat16")
WARM_UP_STEPS = 3  # libraries choose algorithms, and budgets get their plans: the third step corrects them


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


class Steps:
    """Steps that are measured in turns: a row for each has its counts and times, or the reason why it failed.

    Args:
        device: cpu or cuda.
        by: the key of the steps' names in their rows.
        common: what all rows have.
    """

    def __init__(self, device: str, by: str, **common: object):
        self.device = device
        self.by = by
        self.common = common
        self.rows: dict[str, dict] = {}
        self.steps: dict[str, Step] = {}

    def add(self, name: str, prepared: Callable[[], tuple[dict, Step]]) -> None:
        """Add what `prepared` counts of a step, and the step."""
        row = self.rows[name] = {**self.common, self.by: name}
        try:
            counts, self.steps[name] = prepared()
            row |= counts
        except Exception as error:  # e.g. out of memory, or the compiler's: the others can still be measured
            row["reason"] = reason(error)

    def timed(self, rounds: int, sample_ms: float = 0, graphs: Iterable[str] = ()) -> Rows:
        """The rows with their times; those of `graphs` also as CUDA graphs, whose memory cannot be told apart."""
        replays: dict[str, Step] = {}
        for name, times_ms in timed(self.steps, rounds, self.device, sample_ms).items():
            self.rows[name]["times_ms"] = times_ms
        for name in filter(self.steps.__contains__, graphs):
            try:
                replays[name] = captured(self.steps[name])
            except Exception as error:  # the others can still be captured
                self.rows[name]["not captured"] = reason(error)
        for name, times_ms in timed(replays, rounds, self.device, sample_ms).items():
            self.rows[name]["captured_ms"] = times_ms
        return list(self.rows.values())


def reason(error: Exception) -> str:
    """Why a measurement failed, for the record."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"


def captured(step: Step) -> Step:
    """Replays a step as a CUDA graph. Graphs share their memory: none may use what another has computed."""
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


def process(threads: int) -> ProcessPoolExecutor:
    """A process for measurements, with a number of PyTorch's threads. It ends with this one, however that ends."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(threads,))


def _begin(threads: int) -> None:
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it has ended while this process started
        os._exit(1)
    torch.set_num_threads(threads)
