"""Peak memory and time of the segmentation loss: tiles against whole upsampled logits, plain and compiled:

    python -m scripts.evidence.loss out=FILE.json
    python -m scripts.evidence.loss crop_size=128 rounds=3 classes=[19] out=FILE.json
    python -m scripts.evidence.loss device=cuda crops=8 crop_size=512 out=FILE.json

Measures a loss and its gradient with respect to logits at the network's resolution; on a CPU in one thread.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from engine.schema.keys import key
from engine.segmentation.cross_entropy import CrossEntropy
from keepless.recompute.step.costs import peak_bytes
from scripts.reports import charts, frame
from scripts.reports import markdown as md
from scripts.reports.markdown import MIB, Columns, Rows, mib, section
from scripts.reports.measuring import timed

TILES, PLAIN, COMPILED = "tiles", "whole logits", "whole logits, compiled"
CROSS_ENTROPY, BOOTSTRAPPED = "cross-entropy", "bootstrapped, 25 %"
COLOURS = {TILES: charts.BLUE, PLAIN: charts.BLACK, COMPILED: charts.ORANGE}
Way = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LossArguments(frame.TimedArguments):
    classes: list[int] = key([19, 65, 182], above=1)  # Cityscapes, Vistas, COCO-Stuff with its things
    strides: list[int] = key([8, 16], above=0)  # pixels of a crop per cell of the logits
    crops: int = key(2, above=0)
    crop_size: int = key(256, above=0)


def ways_of(name: str) -> dict[str, Way]:
    """The ways to compute the gradient of a loss with respect to logits (N, K, h, w), given labels (N, H, W)."""
    fraction = None if name == CROSS_ENTROPY else 0.25
    tiled, whole = (CrossEntropy(fraction=fraction, tiles=tiles) for tiles in (True, False))

    def way(loss: Way) -> Way:
        return lambda logits, labels: torch.autograd.grad(loss(logits, labels), logits)[0]

    torch.compiler.reset()  # it compiles a function for only a few shapes
    fused = torch.compile(whole, fullgraph=True, dynamic=False)
    return {TILES: way(tiled), PLAIN: way(whole), COMPILED: way(fused)}


def items(arguments: LossArguments) -> dict[str, tuple[int, int, str]]:
    cases = itertools.product(arguments.classes, arguments.strides, (CROSS_ENTROPY, BOOTSTRAPPED))
    return {case_of(*case): case for case in cases}


def case_of(classes: int, stride: int, name: str) -> str:
    return f"{classes} classes, stride {stride}, {name}"


def measure(arguments: LossArguments, classes: int, stride: int, name: str) -> Rows:
    generator = torch.Generator().manual_seed(0)
    side, cells = arguments.crop_size, math.ceil(arguments.crop_size / stride)
    logits = torch.randn(arguments.crops, classes, cells, cells, generator=generator).to(arguments.device)
    labels = torch.randint(classes, (arguments.crops, side, side), generator=generator, dtype=torch.uint8)
    labels[:, : side // 8] = 255
    labels = labels.to(arguments.device)
    logits.requires_grad_()

    ways = ways_of(name)
    steps = {way: partial(compute, logits, labels) for way, compute in ways.items()}
    exact = ways[PLAIN](logits.detach().double().requires_grad_(), labels)
    times = timed(steps, arguments.rounds, arguments.device)
    return [
        {
            **{"case": case_of(classes, stride, name), "loss": name, "way": way},
            "peak_bytes": peak_bytes(step, arguments.device),
            "error": ((step().double() - exact).norm() / exact.norm()).item(),
            "times_ms": times[way],
        }
        for way, step in steps.items()
    ]


COLUMNS: Columns = [
    ("", "{way}"),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("/ whole logits", lambda row: f"{row['peak_bytes'] / row['beside'][PLAIN]['peak_bytes']:.3f}"),
    ("ms", lambda row: f"{md.median_ms(row):.0f}"),
    ("time / whole logits", lambda row: md.relative_time(row, PLAIN)),
    ("gradient's error", lambda row: f"{row['error']:.0e}"),
]


def about(arguments: dict) -> tuple[str, str]:
    crops = f"{arguments['crops']} crops of {arguments['crop_size']}x{arguments['crop_size']} pixels, float32"
    return f"Peak and time, on {frame.DEVICES[arguments['device']]}", f"{crops}; {arguments['rounds']} rounds"


def sections(call: dict, picture: str) -> Iterator[str]:
    groups = md.grouped(frame.rows_of(call), ["case"], "way")
    what = "The bootstrapped loss and its gradient: lower is better, and both axes are logarithmic."
    yield f"![peak and time of each way]({picture}.png)\n*{what}*"
    slower = md.longer({case: md.time_ratio(rows, TILES, PLAIN).median for case, rows in groups.items()})
    yield f"Tiles take longer than whole logits in: {slower}."
    yield from (section(case, md.columns(rows.values(), COLUMNS)) for case, rows in groups.items())


def picture(call: dict) -> Figure:
    """Bars for each number of classes and stride, of the bootstrapped loss, which the paper trains with."""
    groups = md.grouped((row for row in frame.rows_of(call) if row["loss"] == BOOTSTRAPPED), ["case"], "way")
    names = ["\n".join(case.split(", ")[:2]) for case in groups]
    figure, (peak, time) = charts.panels(2, 1, (9, 7))
    for axes, value, label in (
        (peak, lambda row: row["peak_bytes"] / MIB, "peak of the loss, MiB"),
        (time, md.median_ms, "loss and gradient, ms"),
    ):
        shown = {way: [value(rows[way]) for rows in groups.values()] for way in COLOURS}
        charts.bars(axes, names, shown, COLOURS, {}, ylabel=label, yscale="log")
    charts.legend(figure, columns=4)
    return figure


BENCHMARK = frame.Benchmark("loss", LossArguments, items, measure, about, sections, picture)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
