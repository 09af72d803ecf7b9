"""Peak and time of the segmentation loss: tiles beside whole upsampled logits, plain, compiled and a crop at a time:

    python -m scripts.evidence.loss out=docs/results/loss.json
    python -m scripts.evidence.loss crop_size=128 rounds=3 classes=[19] out=FILE.json
    python -m scripts.evidence.loss device=cuda crops=8 crop_size=512 out=docs/results/loss_cuda.json

A loss and its gradient with respect to logits at the network's resolution, in one thread on a CPU.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from engine.schema.keys import key
from engine.segmentation.losses import BootstrappedCrossEntropy, CrossEntropy
from scripts.evidence import frame
from scripts.evidence.frame import MIB, mib
from scripts.evidence.measuring import peak_bytes, timed
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns, section

TILES, PLAIN, COMPILED, EACH_CROP = "tiles", "whole logits", "whole logits, compiled", "whole logits, a crop at a time"
CROSS_ENTROPY, BOOTSTRAPPED = "cross-entropy", "bootstrapped, 25 %"
COLOURS = {TILES: charts.BLUE, PLAIN: charts.BLACK, COMPILED: charts.ORANGE, EACH_CROP: charts.GREY}
Way = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LossArguments(frame.DeviceArguments):
    classes: list[int] = key([19, 65, 182], above=1)  # Cityscapes, Vistas, COCO-Stuff with its things
    strides: list[int] = key([8, 16], above=0)  # pixels of a crop per cell of the logits
    crops: int = key(2, above=0)
    crop_size: int = key(256, above=0)
    rounds: int = key(15, above=0)  # each times every way once


def ways_of(name: str) -> dict[str, Way]:
    """The ways to compute the gradient of a loss with respect to logits (N, K, h, w), given labels (N, H, W)."""
    make = CrossEntropy if name == CROSS_ENTROPY else BootstrappedCrossEntropy
    tiled, whole = make(), make(tiles=False)

    def way(loss: Way) -> Way:
        return lambda logits, labels: torch.autograd.grad(loss(logits, labels), logits)[0]

    def each_crop(logits: Tensor, labels: Tensor) -> Tensor:
        pairs = zip(logits.split(1), labels.split(1), strict=True)
        return torch.cat([way(whole)(own.detach().requires_grad_(), label) for own, label in pairs]) / len(labels)

    torch.compiler.reset()  # it compiles a function for a few shapes at most
    fused = torch.compile(whole, fullgraph=True, dynamic=False)
    return {TILES: way(tiled), PLAIN: way(whole), COMPILED: way(fused), EACH_CROP: each_crop}


def measure(arguments: LossArguments, clock: frame.Clock) -> Iterator[dict]:
    torch.set_num_threads(1)
    rows: list[dict] = []
    for classes in arguments.classes:
        for stride in arguments.strides:
            for name in (CROSS_ENTROPY, BOOTSTRAPPED):
                rows += measured(arguments, classes, stride, name)
                clock.report(f"{classes} classes, stride {stride}, {name}")
                yield {"environment": {"threads": 1}, "rows": rows}


def measured(arguments: LossArguments, classes: int, stride: int, name: str) -> Iterator[dict]:
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
    for way, step in steps.items():
        yield {
            "case": f"{classes} classes, stride {stride}, {name}",
            "classes": classes,
            "stride": stride,
            "loss": name,
            "way": way,
            "peak_bytes": peak_bytes(step, arguments.device),
            "error": ((step().double() - exact).norm() / exact.norm()).item(),
            "times_ms": times[way],
        }


COLUMNS: Columns = [
    ("", "{way}"),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("/ whole logits", lambda row: f"{row['peak_bytes'] / row['beside'][PLAIN]['peak_bytes']:.3f}"),
    ("ms", lambda row: f"{statistics.median(row['times_ms']):.0f}"),
    ("time / whole logits", lambda row: frame.relative_time(row, PLAIN)),
    ("gradient's error", lambda row: f"{row['error']:.0e}"),
]


def page(result: dict, file: str) -> str:
    groups = frame.grouped(result["rows"], ["case"], "way")
    tables = [section(case, columns(rows.values(), COLUMNS)) for case, rows in groups.items()]
    slower = frame.longer({case: frame.time_ratio(rows, TILES, PLAIN).median for case, rows in groups.items()})
    picture = f"![peak and time of each way]({file}.png)"
    return frame.page_text("loss", result, tables=tables, slower=slower, picture=picture)


def pictures(result: dict) -> dict[str, Figure]:
    """Bars for each number of classes and stride, of the bootstrapped loss, which the paper trains with."""
    groups = frame.grouped((row for row in result["rows"] if row["loss"] == BOOTSTRAPPED), ["case"], "way")
    names = ["\n".join(case.split(", ")[:2]) for case in groups]
    figure, (peak, time) = charts.panels(2, 1, (9, 7))
    for axes, value, label in (
        (peak, lambda row: row["peak_bytes"] / MIB, "peak of the loss, MiB"),
        (time, lambda row: statistics.median(row["times_ms"]), "loss and gradient, ms"),
    ):
        shown = [
            charts.Series(way, [value(rows[way]) for rows in groups.values()], colour=colour)
            for way, colour in COLOURS.items()
        ]
        charts.bars(axes, names, shown, ylabel=label, yscale="log")
    charts.legend(figure, columns=4)
    return {"": figure}


run, main = frame.benchmark("loss", LossArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
