"""Measure time and memory of BN + ACT + CONV in every strategy (paper, section 4.3 and Figure 4):

    python -m scripts.evidence.layers [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.layers dtypes=[float32] only=[bn_act_conv/CONV1] out=FILE.json
    python -m scripts.evidence.layers device=cuda batch=32 captured=true out=FILE.json

FILE.png is a chart like Figure 4.
"""

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from engine.assemble.network import STRATEGIES
from engine.schema.keys import key
from keepless import ABN, recompute_activations
from keepless.norms.backends import BACKENDS, backend_for
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import compiler_settings
from models.blocks import NormAct
from scripts.reports import charts, frame
from scripts.reports import markdown as md
from scripts.reports.markdown import Columns, Rows, mib, section, time_ratio
from scripts.reports.measuring import LAYOUTS, Step, captured, compiled, timed

GROUP = "bn_act_conv"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Compiling takes seconds: on CUDA, where a run should take minutes, only the most used pairs of layout and dtype.
COMPILED_ON_CUDA = (("contiguous", "float32"), ("channels_last", "bfloat16"))


# Channels and pixels of the inputs of bn1 in an identity block of each module of ResNeXt-101 at 224 pixels.
SHAPES = {"CONV1": (256, 56), "CONV2": (512, 28), "CONV3": (1024, 14), "CONV4": (2048, 7)}


@dataclass
class LayersArguments(frame.CapturedArguments):
    threads: int = key(2, above=0)  # of PyTorch on the CPU
    dtypes: list[str] = key(["float32"], one_of=tuple(DTYPES))
    layouts: list[str] = key([*LAYOUTS], one_of=tuple(LAYOUTS))  # memory formats
    batch: int = key(4, above=0)  # images
    backend: str = key("auto", one_of=BACKENDS)  # of the checkpointing and in-place strategies
    sample_ms: float = key(20.0, above=0)  # least time of one sample, a mean over repeats
    compiler: str | None = "inductor"  # of torch.compile, for whole blocks; null leaves those strategies out


class Cell(NamedTuple):
    """One input, on which all strategies are measured in turn."""

    shape: str  # of SHAPES
    size: tuple[int, int, int, int]  # (N, C, H, W)
    layout: str  # of LAYOUTS
    dtype: str  # of DTYPES
    device: str

    def __str__(self) -> str:
        return f"{GROUP}/{self.shape}/{self.layout}/{self.dtype}"

    def tensor(self, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, device=self.device, dtype=DTYPES[self.dtype])
        return values.contiguous(memory_format=LAYOUTS[self.layout])

    def block(self, norm_act: NormAct) -> nn.Module:
        """The norm and a 1x1 convolution to half the channels."""
        channels = self.size[1]
        convolution = nn.Conv2d(channels, channels // 2, 1, bias=False, dtype=DTYPES[self.dtype])
        block = nn.Sequential(norm_act(channels), convolution)
        recompute_activations(block, checkpointed_only=True)
        return block.to(self.device, memory_format=LAYOUTS[self.layout])  # type: ignore[call-overload]  # torch lacks it


STANDARD = "standard"
COMPILED = "standard, compiled"
BUDGET = "standard, compiled, budget 0.5"
CHECKPOINTING_B = "checkpointing (b)"
CHECKPOINTING_C = "checkpointing (c)"
INPLACE_1 = "in-place I"
INPLACE_2 = "in-place II"
PACKAGE = "released package"
OURS = {  # by their norm
    "checkpoint": CHECKPOINTING_B,
    "checkpoint_xhat": CHECKPOINTING_C,
    "inplace_1": INPLACE_1,
    "inplace": INPLACE_2,
}


class Strategy(NamedTuple):
    name: str
    norm_act: NormAct
    backend: str
    budget: float | None = None  # of torch.compile: share of the activations that it may keep; None: not compiled
    overwrites: bool = False  # the norm writes over its input


def batch_norm_leaky_relu(channels: int) -> nn.Module:
    """The standard layers in the form that compiles to the fastest code.

    Given an *in-place* activation, TorchInductor 2.12 keeps a mask of the signs as well, in a loop over BN + ACT that
    takes ten times as long on the CPU.
    """
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01))


def released_norm(channels: int) -> nn.Module:
    from inplace_abn import InPlaceABN as Released

    return Released(channels)


def strategies(arguments: LayersArguments, cell: Cell) -> list[Strategy]:
    """The strategies of a cell. The released package computes only in float32."""
    own = arguments.backend
    chosen = [Strategy(STANDARD, ABN, "eager")]
    chosen += [Strategy(name, partial(STRATEGIES[norm], backend=own), own) for norm, name in OURS.items()]
    if arguments.compiler and (cell.device == "cpu" or (cell.layout, cell.dtype) in COMPILED_ON_CUDA):
        chosen.append(Strategy(COMPILED, batch_norm_leaky_relu, arguments.compiler, 1.0))
        chosen.append(Strategy(BUDGET, batch_norm_leaky_relu, arguments.compiler, 0.5))
    if cell.dtype == "float32" and find_spec("inplace_abn"):
        chosen.append(Strategy(PACKAGE, released_norm, "released", overwrites=True))
    return chosen


def items(arguments: LayersArguments) -> dict[str, tuple[Cell]]:
    found = itertools.product(arguments.dtypes, arguments.layouts, SHAPES.items())
    cells = (
        Cell(shape, (arguments.batch, channels, side, side), layout, dtype, arguments.device)
        for dtype, layout, (shape, (channels, side)) in found
    )
    return {str(cell): (cell,) for cell in cells}


def measure(arguments: LayersArguments, cell: Cell) -> Rows:
    """Measure all strategies on one input; one that fails has a row with the reason."""
    chosen, failed = strategies(arguments, cell), Rows()
    facts: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    with (
        compiler_settings(recompile_limit=1024, accumulated_recompile_limit=1024),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
    ):
        torch.manual_seed(0)
        x = cell.tensor(cell.size).requires_grad_()
        with torch.no_grad():
            dz = cell.tensor(tuple(cell.block(chosen[0].norm_act)(x).shape))
        for strategy in chosen:
            measured = strategy.name
            try:
                facts[measured], steps[measured] = prepared(strategy, cell, x, dz)
                if arguments.captured:
                    measured = as_graph(measured)
                    steps[measured] = captured(steps[strategy.name], cell.device)
            except Exception as error:  # of a compiler or of the package: the others can still be measured
                failed.append({"cell": str(cell), "strategy": measured, "reason": frame.reason(error)})
        times_ms = timed(steps, arguments.rounds, cell.device, arguments.sample_ms)
    steps.clear()
    gc.collect()
    common: dict = {"group": GROUP, "shape": cell.shape, "size": list(cell.size), "layout": cell.layout}
    common |= {"dtype": cell.dtype, "input_bytes": x.nbytes}
    rows: Rows = [{**common, "strategy": name, **facts[name], "times_ms": times_ms[name]} for name in facts]
    for row in rows:
        graph_ms = times_ms.get(as_graph(row["strategy"]))
        row |= {} if graph_ms is None else {"captured_ms": graph_ms}
    return rows + failed


def as_graph(strategy: str) -> str:
    return f"{strategy}, captured"


def prepared(strategy: Strategy, cell: Cell, x: Tensor, dz: Tensor) -> tuple[dict, Step]:
    """Everything but times; and the step to time, warmed up, which computes gradients of x and all parameters."""
    block = cell.block(strategy.norm_act)
    forward: Callable[[Tensor], Tensor] = block
    backend = strategy.backend
    if backend == "auto":
        backend = type(backend_for("auto", x)).__name__.removesuffix("Backend").lower()
    if strategy.budget is not None:
        forward = compiled(block, backend, strategy.budget)

    def output(owned: bool = False) -> Tensor:
        """An owned input has no other reference, as in a network, so it is freed as soon as it is not needed."""
        return forward(x.clone() if owned or strategy.overwrites else x)

    def step(owned: bool = False) -> object:
        return torch.autograd.grad(output(owned), [x, *block.parameters()], dz)

    for _ in range(3):
        step()
    # x counts if it is kept, because that keeps it alive.
    saved, peak = kept_bytes(block, output, []), peak_bytes(partial(step, owned=True), cell.device)
    return {"backend": backend, "saved_bytes": saved, "peak_bytes": peak}, step


TITLES = {GROUP: "BN + ACT + CONV", "bn_act": "BN + ACT"}  # an earlier record also has norms alone
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
    title = f"{TITLES[GROUP]}, on {frame.DEVICES[arguments['device']]}"
    captured = ", and as CUDA graphs" * arguments.get("captured", False)
    return title + captured, f"Batch {arguments['batch']}, {arguments['rounds']} rounds"


def sections(call: dict, picture: str) -> Iterator[str]:
    cells = cells_in(call)
    yield overheads(cells)
    drawn = f"![time of a forward and backward pass of each strategy]({picture}.png)"
    yield f"{drawn}\n*Numbers above bars: time relative to standard.*"
    for title, own in by_kind(cells).items():
        yield section(title, md.columns([row for cell in own for row in cell.values()], COLUMNS, left=3))


def overheads(cells: list[Strategies]) -> str:
    """The overhead of the paper's strategies over standard layers, medians over BN + ACT + CONV in all sizes."""
    complete = [cell for cell in of_figure_4(cells) if {*PAPER} <= cell.keys()]
    about = f"Overhead over standard, {TITLES[GROUP]}, medians: {_medians(complete, 'times_ms')}. "
    graphs = [cell for cell in complete if all("captured_ms" in cell[name] for name in (STANDARD, *PAPER))]
    about += f"As CUDA graphs: {_medians(graphs, 'captured_ms')}. " if graphs else ""
    return f"{about}{_by_shape(complete)} {OF_THE_PAPER}" if complete else ""


def _by_shape(cells: list[Strategies]) -> str:
    """A median over all sizes may hide that they differ."""
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        ratios.setdefault(cell[STANDARD]["shape"], []).append(time_ratio(cell, PAPER[0], STANDARD).median)
    shown = ", ".join(f"{shape} {statistics.median(own):.2f}" for shape, own in ratios.items())
    return f"Time of {PAPER[0]} relative to standard, by shape: {shown}."


def _medians(cells: list[Strategies], times: str) -> str:
    ratios = {name: [time_ratio(cell, name, STANDARD, times).median for cell in cells] for name in PAPER if cells}
    return ", ".join(f"{name} {100 * statistics.median(own) - 100:+.1f} %" for name, own in ratios.items())


def of_figure_4(cells: list[Strategies]) -> list[Strategies]:
    return [cell for cell in cells if cell[STANDARD]["group"] == GROUP]


def _size(row: dict) -> str:
    return "x".join(map(str, row["size"]))


COLUMNS: Columns = [
    ("shape", lambda row: f"{row['shape']} {_size(row)}" if row["strategy"] == STANDARD else ""),
    ("strategy", "{strategy}"),
    ("backend", "{backend}"),
    ("ms", lambda row: f"{md.median_ms(row):.3f}"),
    ("/ standard", lambda row: md.relative_time(row, STANDARD)),
    ("captured ms", lambda row: f"{md.median_ms(row, 'captured_ms'):.3f}" if "captured_ms" in row else ""),
    ("/ standard", lambda row: md.relative_time(row, STANDARD, "captured_ms") if "captured_ms" in row else ""),
    ("saved MiB", lambda row: mib(row["saved_bytes"], 2)),
    ("peak MiB", lambda row: mib(row["peak_bytes"], 2)),
]


def picture(call: dict) -> Figure | None:
    """Figure 4: a panel for each layout and dtype, bars for each shape, labelled with the ratio to standard."""
    cells, times = cells_in(call), "times_ms"
    if any("captured_ms" in cell[STANDARD] for cell in cells):  # the host's time does not count there, as in the paper
        times = "captured_ms"
        cells = [{name: row for name, row in cell.items() if times in row} for cell in cells if times in cell[STANDARD]]
    kinds = by_kind(of_figure_4(cells))
    if not kinds:
        return None
    label = "forward + backward, ms" + ", as a CUDA graph" * (times == "captured_ms")
    figure, panels = charts.panels(len(kinds), 1, (12, 0.8 + 3.4 * len(kinds)))
    for axes, (title, own) in zip(panels, kinds.items(), strict=True):
        names = [f"{cell[STANDARD]['shape']}\n{_size(cell[STANDARD])}" for cell in own]
        shown, texts = dict[str, list[float]](), dict[str, list[str]]()
        for name in COLOURS:
            times_ms = [md.median_ms(cell[name], times) if name in cell else math.nan for cell in own]
            ratios = [f"{time_ratio(cell, name, STANDARD, times).median:.2f}" if name in cell else "" for cell in own]
            if any(ratios):
                shown[name] = times_ms
                texts |= {} if name == STANDARD else {name: ratios}
        charts.bars(axes, names, shown, COLOURS, texts, title=title, ylabel=label)
    charts.legend(figure, columns=4)
    return figure


BENCHMARK = frame.Benchmark("layers", LayersArguments, items, measure, about, sections, picture)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
