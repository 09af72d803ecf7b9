"""Measure time and memory of BN + ACT (+ CONV) in every strategy (paper, section 4.3 and Figure 4), and beyond:

    python -m scripts.evidence.abn [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.abn dtypes=[float32] rounds=5 minutes=3 out=FILE.json
    python -m scripts.evidence.abn measure=false out=FILE.json

FILE.png is a chart like Figure 4.
"""

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.memory import keep_freed_memory
from engine.schema.keys import key
from keepless.norms.backends import check_backend
from keepless.torch_internals import compiler_settings
from scripts.evidence.abn_page import page, pictures
from scripts.evidence.abn_strategies import (
    BLOCKS,
    COPY,
    DTYPES,
    GROUPS,
    HOST,
    HOST_SIZE,
    LARGE,
    NETWORK_IMAGES,
    STANDARD,
    Cell,
    Strategy,
    Work,
    computing_backend,
    strategies,
)
from scripts.evidence.frame import Clock, DeviceArguments, benchmark, check_choices, interleaved, ratio_of, reason
from scripts.evidence.left_out_launches import launches_left_out
from scripts.evidence.measuring import LAYOUTS, Step, compiled, peak_bytes, replayed, timer

# Compiling takes seconds: on CUDA, where a run should take minutes, only the most used pairs of layout and dtype.
COMPILED_ON_CUDA = (("contiguous", "float32"), ("channels_last", "bfloat16"))

REPLAY = ", replayed"  # of a timer

MEMORY = ("saved_bytes", "saved_vector_bytes", "saved_buffers", "peak_bytes")


class Settings(NamedTuple):
    """Arguments whose defaults depend on the device."""

    groups: list[str]
    dtypes: list[str]
    batch: int
    rounds: int
    sample_ms: float  # each time is a mean over enough repeats to take this long
    minutes: float  # cells that would start later are left out
    replays: bool  # a step is also captured in a CUDA graph and replayed, without the host's time


DEFAULTS = {
    "cpu": Settings([*BLOCKS, "network"], ["float32"], 4, rounds=15, sample_ms=20.0, minutes=12.0, replays=False),
    "cuda": Settings([*BLOCKS, *HOST], ["float32", "bfloat16"], 128, rounds=20, sample_ms=8.0, minutes=8, replays=True),
}


@dataclass
class AbnArguments(DeviceArguments):
    """Null takes the value in DEFAULTS."""

    groups: list[str] | None = None  # of measurements; null: all
    dtypes: list[str] | None = None  # null: a selection that suits the device
    layouts: list[str] = field(default_factory=lambda: list(LAYOUTS))  # memory formats
    batch: int | None = key(None, above=0)  # images; null: as suits the device
    channels: list[int] = key([256, 512, 1024, 2048], least=2)  # of CONV1 … CONV4
    pixels: list[int] = key([56, 28, 14, 7], least=1)  # height and width of their feature maps
    backend: str = "auto"  # of the checkpointing and in-place strategies; in-place II is measured with each
    large: bool = True  # BN + ACT also on a tensor larger than any cache
    rounds: int | None = key(None, above=0)  # null: as suits the device
    sample_ms: float | None = key(None, above=0)  # least time of one sample; null: as suits the device
    compiler: str | None = "inductor"  # of torch.compile, for whole blocks; null leaves those strategies out
    minutes: float | None = key(None, above=0)  # most time, after which a round is the last; null: as suits the device
    replays: bool | None = None  # time replays of a CUDA graph as well; null: on CUDA

    def settings(self) -> Settings:
        given = {name: getattr(self, name) for name in Settings._fields}
        return DEFAULTS[self.device]._replace(**{name: value for name, value in given.items() if value is not None})

    def cells(self) -> Iterator[Cell]:
        """CONV1 … CONV4 are the inputs of bn1 in an identity block of each module of ResNeXt-101 at 224 pixels."""
        chosen = self.settings()
        single = {"network": ("NETWORK", NETWORK_IMAGES), **dict.fromkeys(HOST, ("TINY", HOST_SIZE))}
        for group in chosen.groups:
            if group in single:
                yield Cell(group, *single[group], "contiguous", "float32", self.device)
                continue
            for dtype, layout in itertools.product(chosen.dtypes, self.layouts):
                for i, (channels, side) in enumerate(zip(self.channels, self.pixels, strict=True)):
                    yield Cell(group, f"CONV{i + 1}", (chosen.batch, channels, side, side), layout, dtype, self.device)
                if group == "bn_act" and self.large:
                    yield Cell(group, "LARGE", LARGE[self.device], layout, dtype, self.device)

    def check(self) -> None:
        super().check()
        for name, given, known in (
            ("groups", self.settings().groups, GROUPS),
            ("dtypes", self.settings().dtypes, DTYPES),
            ("layouts", self.layouts, LAYOUTS),
        ):
            check_choices(name, given, known)
        check_backend(self.backend)
        if len(self.channels) != len(self.pixels):
            raise ValueError(f"channels={self.channels} pixels={self.pixels}: expected lists of the same length")
        if any(c % 2 for c in self.channels):
            raise ValueError(f"channels={self.channels}: expected even numbers, the convolution halves them")


def measure(arguments: AbnArguments, clock: Clock) -> dict:
    """Measure all cells; return their rows, and why others are left out."""
    settings = arguments.settings()
    kept = arguments.device == "cuda" or keep_freed_memory()
    rows: list[dict] = []
    left_out: list[dict] = []
    with surroundings():
        for cell in arguments.cells():
            reasons = {"all": f"out of time: minutes={settings.minutes:g}"}
            if clock.seconds <= 60 * settings.minutes:
                try:
                    with launches_left_out() if cell.group in HOST and cell.device == "cpu" else nullcontext():
                        measured, reasons = measure_cell(cell, arguments, settings)
                    rows += measured
                except Exception as error:  # e.g. out of memory: earlier results are kept
                    reasons = {"all": reason(error)}
                clock.report(cell)
            left_out += [{"cell": str(cell), "strategy": name, "reason": why} for name, why in reasons.items()]
    environment = {"freed_memory_kept": kept}
    return {"arguments": settings._asdict(), "environment": environment, "rows": rows, "left_out": left_out}


def measure_cell(cell: Cell, arguments: AbnArguments, settings: Settings) -> tuple[list[dict], dict[str, str]]:
    """Measure all strategies on one input. Returns their rows, and why a strategy has none."""
    uncompiled = "compiler=null" if arguments.compiler is None else None
    if cell.device == "cuda" and (cell.layout, cell.dtype) not in COMPILED_ON_CUDA:
        uncompiled = "to save time, not compiled for this layout and dtype"
    chosen, left_out = strategies(cell, uncompiled, arguments.backend)
    torch.manual_seed(0)
    x = cell.tensor(cell.size).requires_grad_(cell.group != "network")
    with torch.no_grad():
        dz = cell.tensor(tuple(cell.block(chosen[0].norm_act)(x).shape))
    facts: dict[str, dict] = {}
    timers: dict[str, Callable[[int], float]] = {}

    def add(name: str, found: dict, step: Step) -> None:
        timers[name] = timer(step, settings.sample_ms, cell.device)
        facts[name] = found
        if settings.replays:
            try:
                timers[name + REPLAY] = timer(replayed(step, cell.device), settings.sample_ms, cell.device)
            except Exception as error:  # it waits for the device, which no graph can hold
                left_out[name + REPLAY] = reason(error)

    for strategy in chosen:
        try:
            add(strategy.name, *prepared(strategy, cell, x, dz, arguments.compiler))
        except Exception as error:  # of a compiler or of the package: the others can still be measured
            left_out[strategy.name] = reason(error)
    if STANDARD not in timers:
        return [], left_out
    if cell.group in BLOCKS:
        add(COPY, dict.fromkeys(("backend", *MEMORY)), x.detach().clone)
    times_ms = interleaved(timers, settings.rounds)
    timers.clear()
    gc.collect()
    common = {**cell._asdict(), "size": list(cell.size), "input_bytes": x.nbytes}
    rows = [{**common, "strategy": name, **facts[name], **summarised(times_ms, name)} for name in facts]
    return rows, left_out


def summarised(times_ms: dict[str, list[float]], name: str) -> dict:
    ratio, *quartiles = (round(value, 4) for value in ratio_of(times_ms[name], times_ms[STANDARD]))
    median_ms = round(statistics.median(times_ms[name]), 5)
    found = {"median_ms": median_ms, "ratio": ratio, "ratio_quartiles": quartiles, "times_ms": times_ms[name]}
    replays = [times_ms.get(each + REPLAY) for each in (name, STANDARD)]
    if replays[0] is not None:
        found["replay_ms"] = round(statistics.median(replays[0]), 5)
        found["replay_times_ms"] = replays[0]
    if replays[0] is not None and replays[1] is not None:
        found["replay_ratio"] = round(ratio_of(replays[0], replays[1]).median, 4)
    return found


def prepared(strategy: Strategy, cell: Cell, x: Tensor, dz: Tensor, compiler: str | None) -> tuple[dict, Step]:
    """Everything but times, and the step to time, compiled and warmed up."""
    block = cell.block(strategy.norm_act)
    backend = strategy.backend
    if strategy.compiled:
        assert compiler is not None
        forward: Callable[[Tensor], Tensor] = compiled(block, compiler, strategy.budget)
        backend = compiler
    else:
        forward = block
        if backend == "auto":
            backend = computing_backend(backend, cell)
    work = Work(block, forward, x, dz, strategy.overwrites)
    for _ in range(3):
        work.step()
    if cell.group in HOST:
        return {"backend": backend, **dict.fromkeys(MEMORY)}, work.step
    saved, vectors = work.saved_bytes()
    return {
        "backend": backend,
        "saved_bytes": saved,
        "saved_vector_bytes": vectors,
        "saved_buffers": round((saved - vectors) / x.nbytes, 3),  # in sizes of the input
        "peak_bytes": peak_bytes(work.owning_step, cell.device),
    }, work.step


@contextmanager
def surroundings() -> Iterator[None]:
    """Context in which cells are measured: a process group, a compiler that never gives up, cuDNN's fastest."""
    with (
        _alone_in_a_group(),
        compiler_settings(recompile_limit=1024, accumulated_recompile_limit=1024),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
    ):
        yield


@contextmanager
def _alone_in_a_group() -> Iterator[None]:
    """Context with a process group of this process alone, unless there is a group already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


run, main = benchmark("abn", AbnArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
