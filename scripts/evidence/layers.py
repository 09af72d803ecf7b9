"""Measure time and memory of BN + ACT (+ CONV) in every strategy (paper, section 4.3 and Figure 4), and beyond:

    python -m scripts.evidence.layers [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.layers dtypes=[float32] only=[bn_act_conv] out=FILE.json
    python -m scripts.evidence.layers groups=[host,host_eval] rounds=25 out=FILE.json

FILE.png is a chart like Figure 4.
"""

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from engine.schema.keys import key
from keepless.norms.backends import check_backend
from keepless.torch_internals import compiler_settings
from scripts.evidence import strategies
from scripts.evidence.strategies import (
    BLOCKS,
    BUDGET,
    CHECKPOINTING_B,
    CHECKPOINTING_C,
    COMPILED,
    COPY,
    HOST,
    INPLACE_1,
    INPLACE_2,
    INPLACE_COMPILED,
    PACKAGE,
    STANDARD,
    Cell,
    Strategy,
    Work,
)
from scripts.reports import charts, frame
from scripts.reports import markdown as md
from scripts.reports.markdown import Columns, Rows, mib, ratio_of, section, time_ratio
from scripts.reports.measuring import LAYOUTS, Step, compiled, interleaved, peak_bytes, replayed, timer

# Compiling takes seconds: on CUDA, where a run should take minutes, only the most used pairs of layout and dtype.
COMPILED_ON_CUDA = (("contiguous", "float32"), ("channels_last", "bfloat16"))
REPLAY = ", replayed"  # of a timer
MEMORY = ("saved_bytes", "saved_vector_bytes", "peak_bytes")
SUITED: dict[str, dict] = {  # arguments that are null, by device; `replays`: of CUDA graphs, without the host's time
    "cpu": dict(groups=[*BLOCKS, "network"], dtypes=["float32"], batch=4, sample_ms=20.0, replays=False),
    "cuda": dict(groups=[*BLOCKS], dtypes=["float32", "bfloat16"], batch=128, sample_ms=8.0, replays=True),
}


@dataclass
class LayersArguments(frame.DeviceArguments):
    """Null takes what suits the device."""

    threads: int = key(2, above=0)  # of PyTorch on the CPU
    groups: list[str] | None = None  # of measurements; null: all but the host's time
    dtypes: list[str] | None = None
    layouts: list[str] = field(default_factory=lambda: list(LAYOUTS))  # memory formats
    batch: int | None = key(None, above=0)  # images
    channels: list[int] = key([256, 512, 1024, 2048], least=2)  # of CONV1 … CONV4
    pixels: list[int] = key([56, 28, 14, 7], least=1)  # height and width of their feature maps
    backend: str = "auto"  # of the checkpointing and in-place strategies; in-place II is measured with each
    large: bool = True  # BN + ACT also on a tensor larger than any cache
    sample_ms: float | None = key(None, above=0)  # least time of one sample, a mean over repeats
    compiler: str | None = "inductor"  # of torch.compile, for whole blocks; null leaves those strategies out
    replays: bool | None = None  # time replays of a CUDA graph as well

    def suited(self) -> "LayersArguments":
        return frame.filled(self, SUITED[self.device])

    def check(self) -> None:
        super().check()
        own = self.suited()
        frame.check_choices("groups", own.groups or (), strategies.GROUPS)
        frame.check_choices("dtypes", own.dtypes or (), strategies.DTYPES)
        frame.check_choices("layouts", self.layouts, LAYOUTS)
        check_backend(self.backend)
        if len(self.channels) != len(self.pixels):
            raise ValueError(f"channels={self.channels} pixels={self.pixels}: expected lists of the same length")
        if any(c % 2 for c in self.channels):
            raise ValueError(f"channels={self.channels}: expected even numbers, the convolution halves them")


def items(arguments: LayersArguments) -> dict[str, tuple[Cell]]:
    return {"/".join([cell.group, cell.shape, cell.layout, cell.dtype]): (cell,) for cell in cells_of(arguments)}


def cells_of(arguments: LayersArguments) -> Iterator[Cell]:
    """CONV1 … CONV4 are the inputs of bn1 in an identity block of each module of ResNeXt-101 at 224 pixels."""
    assert arguments.groups and arguments.dtypes and arguments.batch
    single = {"network": ("NETWORK", strategies.NETWORK_IMAGES)} | dict.fromkeys(HOST, ("TINY", strategies.HOST_SIZE))
    device = arguments.device
    for group in arguments.groups:
        if group in single:
            yield Cell(group, *single[group], "contiguous", "float32", device)
            continue
        for dtype, layout in itertools.product(arguments.dtypes, arguments.layouts):
            for i, (channels, side) in enumerate(zip(arguments.channels, arguments.pixels, strict=True)):
                yield Cell(group, f"CONV{i + 1}", (arguments.batch, channels, side, side), layout, dtype, device)
            if group == "bn_act" and arguments.large:
                yield Cell(group, "LARGE", strategies.LARGE[device], layout, dtype, device)


def measure(arguments: LayersArguments, cell: Cell) -> Rows:
    """Measure all strategies on one input; a strategy that has no row has one with the reason."""
    sample_ms = arguments.sample_ms or 0
    uncompiled = "compiler=null" if arguments.compiler is None else None
    if cell.device == "cuda" and (cell.layout, cell.dtype) not in COMPILED_ON_CUDA:
        uncompiled = "to save time, not compiled for this layout and dtype"
    chosen, left_out = strategies.strategies(cell, uncompiled, arguments.backend)
    facts: dict[str, dict] = {}
    timers: dict[str, Callable[[int], float]] = {}

    def add(name: str, found: dict, step: Step) -> None:
        timers[name] = timer(step, sample_ms, cell.device)
        facts[name] = found
        if arguments.replays:
            try:
                timers[name + REPLAY] = timer(replayed(step, cell.device), sample_ms, cell.device)
            except Exception as error:  # it waits for the device, which no graph can hold
                left_out[name + REPLAY] = frame.reason(error)

    with surroundings(cell):
        torch.manual_seed(0)
        x = cell.tensor(cell.size).requires_grad_(cell.group != "network")
        with torch.no_grad():
            dz = cell.tensor(tuple(cell.block(chosen[0].norm_act)(x).shape))
        for strategy in chosen:
            try:
                add(strategy.name, *prepared(strategy, cell, x, dz, arguments.compiler))
            except Exception as error:  # of a compiler or of the package: the others can still be measured
                left_out[strategy.name] = frame.reason(error)
        if cell.group in BLOCKS:
            add(COPY, dict.fromkeys(("backend", *MEMORY)), x.detach().clone)
        times_ms = interleaved(timers, arguments.rounds)
    timers.clear()
    gc.collect()
    common: dict = {"group": cell.group, "shape": cell.shape, "size": list(cell.size), "layout": cell.layout}
    common |= {"dtype": cell.dtype, "input_bytes": x.nbytes}
    rows = [{**common, "strategy": name, **facts[name], "times_ms": times_ms[name]} for name in facts]
    for row in rows:
        if row["strategy"] + REPLAY in times_ms:
            row["replay_times_ms"] = times_ms[row["strategy"] + REPLAY]
    return [*rows, *({"cell": str(cell), "strategy": name, "reason": why} for name, why in left_out.items())]


def prepared(strategy: Strategy, cell: Cell, x: Tensor, dz: Tensor, compiler: str | None) -> tuple[dict, Step]:
    """Everything but times, and the step to time, compiled and warmed up."""
    block = cell.block(strategy.norm_act)
    forward: Callable[[Tensor], Tensor] = block
    backend = strategies.computing_backend("auto", cell) if strategy.backend == "auto" else strategy.backend
    if strategy.compiled:
        assert compiler is not None
        forward, backend = compiled(block, compiler, strategy.budget), compiler
    work = Work(block, forward, x, dz, strategy.overwrites)
    for _ in range(3):
        work.step()
    if cell.group in HOST:
        return {"backend": backend, **dict.fromkeys(MEMORY)}, work.step
    saved, vectors = work.saved_bytes()
    peak = peak_bytes(work.owning_step, cell.device)
    return {"backend": backend, "saved_bytes": saved, "saved_vector_bytes": vectors, "peak_bytes": peak}, work.step


@contextmanager
def surroundings(cell: Cell) -> Iterator[None]:
    """Context in which a cell is measured: a process group, a compiler that never gives up, cuDNN's fastest."""
    with (
        _alone_in_a_group(),
        compiler_settings(recompile_limit=1024, accumulated_recompile_limit=1024),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
        strategies.launches_left_out() if cell.group in HOST and cell.device == "cpu" else nullcontext(),
    ):
        yield


@contextmanager
def _alone_in_a_group() -> Iterator[None]:
    """Context with a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


TITLES = {
    "bn_act": "BN + ACT",
    "bn_act_conv": "BN + ACT + CONV",
    "network": "Small whole network",
    "host": "Host time of BN + ACT",
    "host_eval": "Host time of BN + ACT, inference",
}
PAPER = (INPLACE_2, INPLACE_1, CHECKPOINTING_C, CHECKPOINTING_B)
OF_THE_PAPER = (
    f"In the paper, overheads rise in this order: {CHECKPOINTING_B} has almost twice the overhead of in-place I."
)
COLOURS = {
    STANDARD: charts.BLACK,
    COMPILED: charts.GREY,
    BUDGET: charts.YELLOW,
    CHECKPOINTING_B: charts.VERMILION,
    CHECKPOINTING_C: charts.ORANGE,
    INPLACE_1: charts.SKY,
    INPLACE_2: charts.BLUE,
    PACKAGE: charts.PURPLE,
}
Strategies = dict[str, dict]  # rows of one cell, by strategy


def cells_in(call: dict) -> list[Strategies]:
    cells = md.grouped(frame.rows_of(call), ("group", "shape", "layout", "dtype"), "strategy").values()
    return [cell for cell in cells if STANDARD in cell]


def by_kind(cells: Iterable[Strategies]) -> dict[str, list[Strategies]]:
    """The cells of each group, layout and dtype, by their title."""
    kinds: dict[str, list[Strategies]] = {}
    for cell in cells:
        standard = cell[STANDARD]
        kinds.setdefault(f"{TITLES[standard['group']]}, {standard['layout']}, {standard['dtype']}", []).append(cell)
    return kinds


def about(arguments: dict) -> tuple[str, str]:
    title = ", ".join(TITLES[group] for group in arguments["groups"])
    return (
        f"{title}, on {frame.DEVICES[arguments['device']]}",
        f"Batch {arguments['batch']}, {arguments['rounds']} rounds",
    )


def sections(call: dict, picture: str) -> Iterator[str]:
    cells = cells_in(call)
    yield comparison(cells)
    if shapes := _shapes(cells):
        what = "Time relative to standard, median over CONV1 to CONV4, and activation-sized buffers kept:"
        drawn = f"![time of a forward and backward pass of each strategy]({picture}.png)"
        yield section("Summary", what, summary(shapes), f"{drawn}\n*Numbers above bars: time relative to standard.*")
    for title, own in by_kind(cells).items():
        yield section(title, md.columns([row for cell in own for row in cell.values()], COLUMNS, left=3))


def comparison(cells: list[Strategies]) -> str:
    """In-place II beside its rivals and beside the paper, and where it is behind."""
    lines = []
    for group, title in TITLES.items():
        if ratios := _ratios(_of_group(group, cells, {INPLACE_2})):
            lines.append(f"- {title}: {_range(ratios.values())} of standard's time. Longer: {md.longer(ratios)}.")
    if released := list(map(_to_package, _of_group("bn_act", cells, {PACKAGE, COPY, INPLACE_2}))):
        times = f"{_range(released)} of the released package's time, without the time to copy its input"
        lines.append(f"- {TITLES['bn_act']}: {times}.")
    if complete := _of_group("bn_act_conv", cells, {*PAPER}):
        medians = {name: statistics.median(_ratios(complete, name).values()) - 1 for name in PAPER}
        overheads = ", ".join(f"{name} {100 * median:+.1f} %" for name, median in medians.items())
        lines.append(f"- Overhead over standard, {TITLES['bn_act_conv']}, medians: {overheads}. {OF_THE_PAPER}")
    for cell in _of_group("network", cells, {COMPILED, INPLACE_COMPILED}):
        time = time_ratio(cell, INPLACE_COMPILED, COMPILED).median
        share = cell[INPLACE_COMPILED]["saved_bytes"] / cell[COMPILED]["saved_bytes"]
        lines.append(f"- {TITLES['network']}, both compiled: {time:.2f} of standard's time, {share:.3f} of its bytes.")
    return section("In-place II", "\n".join(lines)) if lines else ""


def _of_group(group: str, cells: list[Strategies], names: set[str]) -> list[Strategies]:
    """The cells of a group that have all these strategies."""
    return [cell for cell in cells if cell[STANDARD]["group"] == group and names <= cell.keys()]


def _range(values: Collection[float]) -> str:
    return " – ".join(sorted({f"{min(values):.2f}", f"{max(values):.2f}"}))


def _ratios(cells: list[Strategies], ours: str = INPLACE_2) -> dict[str, float]:
    """Time relative to standard, by cell name."""
    names = [" ".join(cell[STANDARD][part] for part in ("shape", "layout", "dtype")) for cell in cells]
    return {name: time_ratio(cell, ours, STANDARD).median for name, cell in zip(names, cells, strict=True)}


def _to_package(cell: Strategies) -> float:
    """Ratio to the package, without the time to copy x: after a convolution the package would need no copy."""
    pairs = zip(cell[PACKAGE]["times_ms"], cell[COPY]["times_ms"], strict=True)
    return ratio_of(cell[INPLACE_2]["times_ms"], [max(package - copy, 1e-6) for package, copy in pairs]).median


def _shapes(cells: list[Strategies]) -> list[Strategies]:
    """The cells CONV1 … CONV4."""
    return [cell for cell in cells if cell[STANDARD]["shape"].startswith("CONV")]


def summary(cells: list[Strategies]) -> str:
    """Every strategy's time to standard, median over the cells of a kind, and the buffers it keeps."""
    kinds = by_kind(cells)

    def entry(name: str, cells: list[Strategies]) -> str:
        found = [cell for cell in cells if name in cell]
        ratios = [_ratio(cell[name]).median for cell in found]
        return f"{statistics.median(ratios):.2f}, {round(_buffers(found[0][name]))} kept" if found else ""

    lines = ([name, *(entry(name, cells) for cells in kinds.values())] for name in COLOURS)
    return md.table(["strategy", *kinds], (line for line in lines if any(line[1:])))


def _ratio(row: dict) -> md.Ratio:
    """The time to standard."""
    return md.Ratio(*(round(value, 4) for value in time_ratio(row["beside"], row["strategy"], STANDARD)))


def _size(row: dict) -> str:
    return "x".join(map(str, row["size"]))


def _buffers(row: dict) -> float:
    """Bytes that are kept, in sizes of the input, without vectors."""
    return round((row["saved_bytes"] - row["saved_vector_bytes"]) / row["input_bytes"], 3)


def _saved_to_standard(row: dict) -> str:
    standard = row["beside"][STANDARD]["saved_bytes"]
    return "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / standard:.3f}"


def _replays(row: dict) -> str:
    """The time of a replay, and its ratio to standard's."""
    if "replay_times_ms" not in row:
        return ""
    own, standard = row["replay_times_ms"], row["beside"][STANDARD].get("replay_times_ms")
    return f"{statistics.median(own):.3f}" + (f" ({ratio_of(own, standard).median:.2f})" if standard else "")


COLUMNS: Columns = [
    ("shape", lambda row: f"{row['shape']} {_size(row)}" if row["strategy"] == STANDARD else ""),
    ("strategy", "{strategy}"),
    ("backend", lambda row: row["backend"] or ""),
    ("ms", lambda row: f"{md.median_ms(row):.3f}"),
    ("/ standard", lambda row: "1" if row["strategy"] == STANDARD else f"{_ratio(row):.2f}"),
    ("saved MiB", lambda row: mib(row["saved_bytes"], 2)),
    ("/ standard", _saved_to_standard),
    ("buffers", lambda row: "" if row["saved_bytes"] is None or row["group"] == "network" else f"{_buffers(row):g}"),
    ("peak MiB", lambda row: mib(row["peak_bytes"], 2)),
    ("replayed ms (/ standard)", _replays),
]


def pictures(call: dict) -> dict[str, Figure]:
    """Figure 4: a panel for each layout and dtype, bars for each shape, labelled with the ratio to standard.

    There is none without CONV1 … CONV4, as if only host time was measured.
    """
    cells = _shapes(cells_in(call))
    kinds = by_kind(_of_group("bn_act_conv", cells, set()) or _of_group("bn_act", cells_in(call), set()))
    if not cells:
        return {}
    figure, panels = charts.panels(len(kinds), 1, (12, 0.8 + 3.4 * len(kinds)))
    for axes, (title, own) in zip(panels, kinds.items(), strict=True):
        names = [f"{cell[STANDARD]['shape']}\n{_size(cell[STANDARD])}" for cell in own]
        series = []
        for name, colour in COLOURS.items():
            found = [cell.get(name) for cell in own]
            times_ms = [math.nan if row is None else md.median_ms(row) for row in found]
            ratios = ["" if row is None else f"{_ratio(row).median:.2f}" for row in found]
            if any(ratios):
                series.append(charts.Series(name, times_ms, colour=colour, texts=[] if name == STANDARD else ratios))
        charts.bars(axes, names, series, title=title, ylabel="forward + backward, ms")
    charts.legend(figure, columns=4)
    return {"": figure}


BENCHMARK = frame.Benchmark("layers", LayersArguments, items, measure, sections, about, pictures)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
