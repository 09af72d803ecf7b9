"""A run of the benchmark: every cell, every strategy."""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from engine.malloc import keep_freed_memory
from engine.provenance import provenance
from scripts.memory_measurement import peak_bytes

from .arguments import Benchmark, command_line
from .cells import Cell, cells
from .measuring import Step, Work, captured, interleaved
from .strategies import COPY, STANDARD, Strategy, compiled, computing_backend, strategies

# Compiling takes seconds: on CUDA, whose run is to take minutes, only for the most used pairs of layout and dtype.
COMPILED_ON_CUDA = (("contiguous", "float32"), ("channels_last", "bfloat16"))


def measure(config: Benchmark) -> dict:
    """All rows, what was left out and why, the arguments and the environment."""
    started_s = time.monotonic()
    known = {**provenance(), "threads": torch.get_num_threads()}  # before the checkout can change
    known["freed_memory_kept"] = config.device == "cuda" or keep_freed_memory()
    rows, left_out = [], []
    with ExitStack() as settings:
        settings.enter_context(_alone_in_a_group())
        settings.enter_context(torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024))
        settings.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True))
        for cell in cells(
            config.device,
            config.groups,
            config.layouts,
            config.dtypes,
            config.batch,
            config.channels,
            config.pixels,
            config.large,
        ):
            if time.monotonic() - started_s > 60 * config.minutes:
                reason = f"the time was over: minutes={config.minutes:g}"
                left_out.append({"cell": str(cell), "strategy": "all", "reason": reason})
                continue
            try:
                measured, reasons = measure_cell(cell, config)
            except Exception as error:  # out of memory, say: what was measured before is not lost
                measured, reasons = [], {"all": _reason(error)}
            rows += measured
            left_out += [{"cell": str(cell), "strategy": name, "reason": reason} for name, reason in reasons.items()]
            print(f"{time.monotonic() - started_s:6.1f} s  {cell}", flush=True)
    return {
        "command": command_line(config),
        "arguments": {key: value for key, value in asdict(config).items() if key not in ("out", "measure")},
        "environment": known,
        "seconds": round(time.monotonic() - started_s, 1),
        "rows": rows,
        "left_out": left_out,
    }


def measure_cell(cell: Cell, config: Benchmark) -> tuple[list[dict], dict[str, str]]:
    """A row for each strategy, and the reasons why others have none."""
    uncompiled = "compiler=null" if config.compiler is None else None
    if cell.device == "cuda" and (cell.layout, cell.dtype) not in COMPILED_ON_CUDA:
        uncompiled = "to save time, not compiled for this layout and dtype"
    chosen, left_out = strategies(cell, uncompiled, config.backend)
    torch.manual_seed(0)
    x = cell.tensor(cell.size).requires_grad_(cell.group != "network")
    with torch.no_grad():
        dz = cell.tensor(tuple(cell.block(chosen[0].norm_act)(x).shape))
    facts: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    for strategy in chosen:
        try:
            facts[strategy.name], steps[strategy.name] = prepare(strategy, cell, x, dz, config)
        except Exception as error:  # of a compiler or of the package: the others can still be measured
            left_out[strategy.name] = _reason(error)
    if STANDARD not in steps:
        return [], left_out
    if cell.group != "network":
        facts[COPY] = dict.fromkeys(("backend", "saved_bytes", "saved_vector_bytes", "saved_buffers", "peak_bytes"))
        steps[COPY] = captured(x.detach().clone) if config.graphs else x.detach().clone
    times = interleaved(steps, config.rounds, config.sample_ms, cell.device)
    steps.clear()
    gc.collect()
    common = {**cell._asdict(), "size": list(cell.size), "input_bytes": x.nbytes}
    return [
        _row({**common, "strategy": name, **facts[name]}, ms, times[STANDARD]) for name, ms in times.items()
    ], left_out


def prepare(strategy: Strategy, cell: Cell, x: Tensor, dz: Tensor, config: Benchmark) -> tuple[dict, Step]:
    """What is known without a clock, and the step to be timed, compiled and warm."""
    block = cell.block(strategy.norm_act)
    forward = compiled(block, config.compiler, strategy.budget) if strategy.compiled else block
    work = Work(block, forward, x, dz, strategy.overwrites)
    for _ in range(3):
        work.step()
    saved, vectors = work.saved_bytes()
    backend = strategy.backend
    if strategy.compiled:
        backend = config.compiler
    elif backend == "auto":
        backend = computing_backend(backend, cell)
    facts = {
        "backend": backend,
        "saved_bytes": saved,
        "saved_vector_bytes": vectors,
        "saved_buffers": round((saved - vectors) / x.nbytes, 3),  # as large as the input
        "peak_bytes": peak_bytes(work.owning_step, cell.device),
    }
    return facts, captured(work.step) if config.graphs else work.step


def _reason(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"


def _row(known: dict, times_ms: list[float], standard_ms: list[float]) -> dict:
    ratios = [ours / standard for ours, standard in zip(times_ms, standard_ms, strict=True)]
    lower, upper = ratios[0], ratios[0]
    if len(ratios) > 1:
        lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        **known,
        "median_ms": round(statistics.median(times_ms), 5),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(lower, 4), round(upper, 4)],
        "times_ms": [round(ms, 5) for ms in times_ms],
    }


@contextmanager
def _alone_in_a_group() -> Iterator[None]:
    """torch.distributed with this process as its only one; the group that is there already, if there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it will exchange nothing
    try:
        yield
    finally:
        dist.destroy_process_group()
