"""Measure time and memory of BN + ACT + CONV in every strategy (paper, section 4.3 and Figure 4):

    python -m benchmarks.layers [device=cpu|cuda] out=FILE.json
    python -m benchmarks.layers dtypes=[float32] only=[CONV1] out=FILE.json
    python -m benchmarks.layers device=cuda batch=32 captured=true out=FILE.json

FILE.png is a chart like Figure 4.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, fx, nn

from benchmarks import frame
from benchmarks.counted import TITLES
from benchmarks.measuring import WARM_UP_STEPS, Step, Steps
from benchmarks.rows import Rows, compared, medians, relative, without_reasons
from engine.assemble.contracts import builder
from engine.schema.keys import CHOICES, key
from keepless import ABN, recompute_activations
from keepless.norms.backends import BACKENDS, backend_for
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from models.blocks import NormAct
from scripts.reports import charts

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Compiling takes seconds: on CUDA, where a run should take minutes, only the most used pairs of layout and dtype.
COMPILED_ON_CUDA = (("contiguous", "float32"), ("channels_last", "bfloat16"))
# Channels and pixels of the inputs of bn1 in an identity block of each module of ResNeXt-101 at 224 pixels.
SHAPES = {"CONV1": (256, 56), "CONV2": (512, 28), "CONV3": (1024, 14), "CONV4": (2048, 7)}


@dataclass
class LayersArguments(frame.CapturedArguments):
    threads: int = key(2, above=0)  # of PyTorch on the CPU
    dtypes: list[str] = key(["float32"], one_of=tuple(DTYPES))
    batch: int = key(4, above=0)  # images
    backend: str = key("auto", one_of=BACKENDS)  # of the checkpointing and in-place strategies
    sample_ms: float = key(20.0, above=0)  # least time of one sample, a mean over repeats
    compiler: str | None = "inductor"  # of torch.compile, for whole blocks; null leaves those strategies out


class Cell(NamedTuple):
    """One input, on which all strategies are measured in turn."""

    size: tuple[int, int, int, int]  # (N, C, H, W)
    layout: str  # of LAYOUTS
    dtype: str  # of DTYPES
    device: str

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


class Strategy(NamedTuple):
    name: str
    norm_act: NormAct
    backend: str
    budget: float | None = None  # of torch.compile: share of the activations that it may keep; None: not compiled
    overwrites: bool = False  # the norm writes over its input


STANDARD = TITLES["std"]
COMPILED = {"standard, compiled": 1.0, "standard, compiled, budget 0.5": 0.5}
PACKAGE = "released package"


def batch_norm_leaky_relu(channels: int) -> nn.Module:
    """The standard layers in the form that compiles to the fastest code.

    Given an *in-place* activation, TorchInductor 2.12 saves a sign mask as well, in a loop over BN + ACT that
    takes ten times as long on the CPU.
    """
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01))


def released_norm(channels: int) -> nn.Module:
    from inplace_abn import InPlaceABN as Released

    return Released(channels)


def strategies(arguments: LayersArguments, cell: Cell) -> list[Strategy]:
    """The strategies of a cell. The released package computes only in float32."""
    strategies_of_cell = []
    for norm, title in TITLES.items():
        backend = "eager" if title == STANDARD else arguments.backend
        strategies_of_cell.append(Strategy(title, builder("norm", CHOICES["norm"][norm](backend=backend)), backend))
    is_compiled = cell.device == "cpu" or (cell.layout, cell.dtype) in COMPILED_ON_CUDA
    if arguments.compiler and is_compiled:
        for name, budget in COMPILED.items():
            strategies_of_cell.append(Strategy(name, batch_norm_leaky_relu, arguments.compiler, budget))
    if cell.dtype == "float32" and find_spec("inplace_abn"):
        strategies_of_cell.append(Strategy(PACKAGE, released_norm, "released", overwrites=True))
    return strategies_of_cell


def items(arguments: LayersArguments) -> dict[str, tuple[str, str, str]]:
    products = itertools.product(arguments.dtypes, LAYOUTS, SHAPES)
    return {f"{shape}/{layout}/{dtype}": (dtype, layout, shape) for dtype, layout, shape in products}


def measure(arguments: LayersArguments, dtype: str, layout: str, shape: str) -> Rows:
    """Measure all strategies on one input."""
    channels, side = SHAPES[shape]
    cell = Cell((arguments.batch, channels, side, side), layout, dtype, arguments.device)
    size = "x".join(map(str, cell.size))
    steps = Steps(cell.device, "strategy", shape=f"{shape} {size}", layout=layout, dtype=dtype)
    with (
        torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
    ):
        torch.manual_seed(0)
        x = cell.tensor(cell.size).requires_grad_()
        with torch.no_grad():
            dz = cell.tensor(tuple(cell.block(ABN)(x).shape))
        for strategy in strategies(arguments, cell):
            steps.add(strategy.name, partial(prepared, strategy, cell, x, dz))
        return steps.timed(arguments.rounds, arguments.sample_ms, steps.rows if arguments.captured else ())


def prepared(strategy: Strategy, cell: Cell, x: Tensor, dz: Tensor) -> tuple[dict, Step]:
    """What is counted; and the step, warmed up, which computes gradients of x and all parameters."""
    block = cell.block(strategy.norm_act)
    forward: Callable[[Tensor], Tensor] = block
    backend = strategy.backend
    if backend == "auto":
        backend = type(backend_for("auto", x)).__name__.removesuffix("Backend").lower()
    if strategy.budget is not None:
        forward = compiled(block, backend, strategy.budget)

    def output(is_owned: bool = False) -> Tensor:
        """An owned input has no other reference, as in a network, so it is freed as soon as it is not needed."""
        return forward(x.clone() if is_owned or strategy.overwrites else x)

    def step(is_owned: bool = False) -> object:
        return torch.autograd.grad(output(is_owned), [x, *block.parameters()], dz)

    for _ in range(WARM_UP_STEPS):
        step()
    # x counts if it is saved, because that keeps it alive.
    saved = kept_bytes(block, output, [])
    peak = peak_bytes(partial(step, is_owned=True), cell.device)
    return {"backend": backend, "saved_bytes": saved, "peak_bytes": peak}, step


def compiled(block: nn.Module, compiler: str, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile a block with torch.compile, for static shapes and as one graph, for which alone the budget holds."""

    def compile_within_budget(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._functorch import config  # `import torch` alone does not load it

        with config.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    return torch.compile(block, fullgraph=True, dynamic=False, backend=compile_within_budget)


def heading(arguments: dict) -> tuple[str, str]:
    captured = ", and as CUDA graphs" if arguments.get("captured", False) else ""
    title = f"BN + ACT + CONV, on {arguments['device'].upper()}{captured}"
    return title, f"Batch {arguments['batch']}, {arguments['rounds']} rounds"


def sections(call: dict, picture: str) -> Iterator[str]:
    cells = call["items"].values()
    yield "In the paper, checkpointing has almost twice the overhead of in-place ABN I. Medians over all inputs:"
    yield medians(cells, "strategy", STANDARD)
    drawn = f"![time of a forward and backward pass of each strategy]({picture}.png)"
    yield f"{drawn}\n*Numbers above bars: time relative to standard.*"
    yield compared(cells, "strategy", STANDARD)


_SHOWN = TITLES | dict(zip(("compiled", "compiled_budget", "other"), (*COMPILED, PACKAGE), strict=True))
COLOURS = {title: charts.METHOD_COLOURS[name] for name, title in _SHOWN.items()}


def picture(call: dict) -> Figure | None:
    """Figure 4: a panel for each layout and dtype, bars for each shape, labelled with the ratio to standard."""
    kinds: dict[str, list[dict[str, dict]]] = {}
    for rows in map(without_reasons, call["items"].values()):
        cell = {row["strategy"]: row for row in rows}
        if STANDARD in cell:
            kinds.setdefault("{layout}, {dtype}".format_map(cell[STANDARD]), []).append(cell)
    if not kinds:
        return None
    # As CUDA graphs if there are some: CPU overhead does not count there, as in the paper.
    is_graph = any("captured_ms" in cell[STANDARD] for cells in kinds.values() for cell in cells)
    times, label = ("captured_ms", ", as a CUDA graph") if is_graph else ("times_ms", "")
    figure, panels = charts.panels(len(kinds), 1, (12, 0.8 + 3.4 * len(kinds)))
    for axes, (title, cells) in zip(panels, kinds.items(), strict=True):
        shown: dict[str, list[float]] = {}
        texts: dict[str, list[str]] = {}
        for name in COLOURS:
            rows = [cell.get(name, {}) for cell in cells]
            if any(times in row for row in rows):
                shown[name] = [statistics.median(row.get(times, [math.nan])) for row in rows]
                ratios = (relative(row, cell[STANDARD], times) for row, cell in zip(rows, cells, strict=True))
                texts[name] = [f"{ratio.median:.2f}" if ratio else "" for ratio in ratios]
        names = [cell[STANDARD]["shape"].replace(" ", "\n") for cell in cells]
        draw_bars(axes, names, shown, texts)
        axes.set(title=title, ylabel=f"forward + backward, ms{label}")
    charts.legend(figure, columns=4)
    return figure


def draw_bars(axes: Axes, names: list[str], shown: dict[str, list[float]], texts: dict[str, list[str]]) -> None:
    """Draw a group of bars for each of `names`: {label: heights}, NaN for none; and {label: texts above them}."""
    places = np.arange(len(names))
    width = 0.84 / len(shown)
    for number, (label, heights) in enumerate(shown.items()):
        middles = places + (number - (len(shown) - 1) / 2) * width
        drawn = axes.bar(middles, heights, 0.92 * width, color=COLOURS[label], label=label)
        axes.bar_label(drawn, texts[label], rotation=90, padding=3, fontsize=8)
    axes.set_xticks(places, names)
    axes.margins(x=0.01, y=0.18)
    axes.grid(False, axis="x")


BENCHMARK = frame.Benchmark("layers", LayersArguments, items, measure, heading, sections, picture)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
