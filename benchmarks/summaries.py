"""The small tables and the picture of README.md, and tables of the pages of keepless and camvid, from the records."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.frame import RESULTS
from benchmarks.rows import GIB, MIB, ratio_of, relative
from scripts.reports import charts
from scripts.reports.markdown import mean_of, table

CHECKPOINTED, PLANNED = "checkpoint per block", "peak of the checkpoints"  # methods of networks.json
CAMVID = "camvid/table3_trained"  # folder of the runs
PROTOCOL = {  # run: norms, side of a crop
    "std": ("standard norms", "240²"),
    "inplace_larger_crops": ("in-place norms, leaky ReLU", "352²"),
    "recompute_larger_crops": ("standard norms, recomputed activations", "376²"),
    "std_equal_time": ("control of time: standard norms", "240²"),
    "std_crop_352": ("control of memory: standard norms", "352²"),
    "std_crop_376": ("control of memory: standard norms", "376²"),
}
PER_SECOND = ("training", "images_per_second")  # of a run
REVNET_DEPTHS = {32: 38, 110: 110, 164: 164}  # by the depth of the ResNet that each is compared with
ABLATIONS = {  # run of 400 steps: what it changes
    "random": "random weights",
    "stride16": "stride 16",
    "equal_head": "the head at the body's learning rate",
    "half_rate": "half the learning rate",
    "inplace": "in-place norms with leaky ReLU",
    "leaky_relu": "leaky ReLU in place of ReLU6, as in-place norms need",
    "no_decay": "no weight decay",
    "imagenet_colours": "ImageNet's colours instead of the weights' own",
    "momentum": "running statistics with momentum 0.01 instead of 0.1",
}


@cache
def record(name: str) -> Any:
    """A file of docs/results, without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str, call: str, **keys: Any) -> Iterator[dict[str, Any]]:
    """The rows with these values in a benchmark's call."""
    (items,) = (record_call["items"] for record_call in record(name)["calls"] if record_call["name"] == call)
    return (row for item_rows in items.values() for row in item_rows if row.items() >= keys.items())


def runs(folder: str, *path: str) -> list[Any]:
    """A value in the results of a run and of its repetitions with other seeds."""
    values = []
    for path_of_run in sorted(filter(Path.is_dir, [RESULTS / folder, *RESULTS.glob(f"{folder}_seed*")])):
        value = record((path_of_run / "results").relative_to(RESULTS).as_posix())
        for key in path:
            value = value[key]
        values.append(value)
    return values


def miou(folder: str, digits: int = 2) -> str:
    """Mean and standard deviation over seeds, in %."""
    return mean_of([100 * score for score in runs(folder, "miou")], digits)


def step_on_h200(network: str, method: str) -> tuple[dict[str, Any], float, float]:
    """A step in bfloat16 on an H200; its time without and with CUDA graphs, relative to the baseline's."""
    rows_by_method = {row["method"]: row for row in rows("networks", "h200", network=network, precision="bfloat16")}
    row = rows_by_method[method]
    base_row = rows_by_method["plain"]
    eager, graphs = (ratio_of(row[key], base_row[key]).median for key in ("times_ms", "captured_ms"))
    return row, eager, graphs


OF_LIBRARIES = {
    "transformers/Llama": "language model",
    "peft/Llama": "with LoRA",
    "transformers/Mixtral": "mixture of experts",
    "diffusers/UNet2DModel": "diffusion U-Net",
}
METHODS = ["", "peak, the same for both", "checkpointing every block", "`keepless` with a budget"]


def keepless_gpu() -> str:
    """Times of checkpointing, and of a plan within its memory, relative to the baseline, on an H200."""
    lines = []
    for name, title in {"resnet50": "ResNet-50", "densenet121": "DenseNet-121"}.items():
        steps, eager, graphs = zip(*(step_on_h200(name, method) for method in (CHECKPOINTED, PLANNED)), strict=True)
        base, _, _ = step_on_h200(name, "plain")
        peaks = f"{steps[1]['peak_bytes'] / GIB:.1f} of {base['peak_bytes'] / GIB:.1f} GiB"
        lines.append([title, peaks, *(f"{time:.2f}" for time in eager)])
        lines.append([f"{title} with CUDA graphs", "", *(f"{time:.2f}" for time in graphs)])
    return table(METHODS, lines)


def keepless_cpu() -> str:
    """The same as medians over networks, on a CPU."""

    def ratios(call: str, method: str, key: str = "times_ms", **filters: str) -> list[float]:
        base = {row["network"]: row for row in rows("networks", call, method="plain")}
        ratios = (relative(row, base[row["network"]], key) for row in rows("networks", call, method=method, **filters))
        return [ratio.median for ratio in ratios if ratio is not None]

    lines = []
    kinds: list[tuple[str, str, dict[str, str]]]
    kinds = [("convolutional network", "cpu", {}), ("vision transformer", "transformers", {})]
    for name, kind in OF_LIBRARIES.items():
        kinds.append((kind, "diffusion" if name.startswith("diffusers") else "libraries", {"network": name}))
    for kind, call, filters in kinds:
        times_by_method = [ratios(call, method, **filters) for method in (CHECKPOINTED, PLANNED)]
        peaks = f"{median(ratios(call, PLANNED, 'peak_bytes', **filters)):.2f}"
        title = kind if filters else f"{kind}, median of {len(times_by_method[0])}"
        lines.append([title, peaks, *(f"{median(times):.2f}" for times in times_by_method)])
    return table(METHODS, lines)


def more_pixels(by: str = "") -> str:
    """How many more pixels in-place norms allow in Table 3's minibatches than standard ones, in %."""
    pixels = {}
    for row in rows("memory_plan", "all", part="fits"):
        pixels[row["column"], row["fit"], row["norm"]] = row[f"{by}crops"] * row[f"{by}crop_size"] ** 2
    percentages = [
        100 * count / pixels[column, fit, "std"] - 100 for (column, fit, norm), count in pixels.items() if norm != "std"
    ]
    return f"+{min(percentages):.0f} to +{max(percentages):.0f} %"


def readme_costs() -> str:
    """What the papers claim of memory and time, and what was measured or estimated."""
    times = {row["switch"]: median(row["times_ms"]) for row in rows("steps", "h100") if "times_ms" in row}
    inplace = "trainer.precision=bfloat16"
    graphs = " trainer.capture=true"
    eager, captured = (100 * times[inplace + end] / times[f"norm=std {inplace}{end}"] - 100 for end in ("", graphs))
    saved = {row["network"]: row["std"] for row in rows("reversible", "cpu", part="activations")}
    less = [saved[f"ResNet-{resnet}"] / saved[f"RevNet-{revnet}"] for resnet, revnet in REVNET_DEPTHS.items()]
    stored, restored = (sum(runs(f"cifar/stored/{name}", *PER_SECOND)) for name in ("stored", "restored"))
    lines = [
        ["pixels in 12 GiB with in-place norms", "memory_plan.md#table-3-what-fits"],
        ["time of a step with in-place norms", "steps.md"],
        ["activations of RevNets on CIFAR-10", "reversible.md#memory-and-operations"],
        ["time of an update of RevNet-38", "cifar.md#from-stored-and-from-restored-activations"],
    ]
    published = (more_pixels("paper_"), "+0.8 to +2 %", "10 times smaller", "1.5 to 2 times as long")
    measured = (
        f"{more_pixels()}, estimated",
        f"{eager:+.0f} %, with CUDA graphs {captured:+.0f} %",
        f"{min(less):.0f} to {max(less):.0f} times smaller",
        f"{stored / restored:.1f} times as long",
    )
    return beside_papers("memory and time", lines, published, measured)


def readme_scores() -> str:
    """Comparisons of the papers that were run smaller."""

    def top1(*folders: str) -> str:
        return " → ".join(mean_of([100 * score for score in runs(f"cifar/{folder}", "top1")], 1) for folder in folders)

    lines = [
        ["RevNet-38 instead of ResNet-32", "cifar.md#revnets-table-3-to-the-end"],
        ["more images in the same memory", "cifar.md#more-images-in-the-same-memory"],
        ["deeper body in the same memory", "cifar.md#a-deeper-body-in-the-same-memory"],
        ["larger crops in the same memory", "camvid.md#table-3s-protocol-from-a-pretrained-backbone"],
    ]
    published = ("92.9 → 92.8, CIFAR-10", "+1.0, ImageNet", "+1.2, ImageNet", "+2.6, Cityscapes")
    measured = (
        f"{top1('table3/resnet32', 'table3/revnet38')}, JPEG copies",
        f"{top1('images/std_64', 'images/inplace_95')}, an epoch of CIFAR-10",
        f"{top1('deeper/std_64', 'deeper/inplace_deeper')}, an epoch of CIFAR-10",
        "CamVid, more at equal steps and less at equal time",
    )
    return beside_papers("score in %", lines, published, measured)


def beside_papers(title: str, lines: list[list[str]], published: Sequence[str], measured: Sequence[str]) -> str:
    """A table of README: what is compared, with a link to its results, as published, and as here."""
    names = [f"[{name}](docs/results/{page})" for name, page in lines]
    return table(
        [title, "published", "here"], [list(cells) for cells in zip(names, published, measured, strict=True)], left=3
    )


def protocol() -> str:
    """The rows of Table 3's protocol on CamVid from a pretrained backbone."""
    lines = []
    for name, (norms, crops) in PROTOCOL.items():
        folder = f"{CAMVID}/{name}"
        (steps,) = {*runs(folder, "config", "trainer", "steps")}
        (planned_row,) = rows("memory_plan", "all", experiment=f"camvid_table3_trained/{name}")
        minutes = mean(runs(folder, "training", "minutes"))
        lines.append([norms, crops, f"{steps}", f"{planned_row['by_tiles'] / MIB:.0f}", f"{minutes:.1f}", miou(folder)])
    titles = ["norm", "crops", "steps", "planned with the loss by tiles, MiB", "minutes", "mIoU %"]
    return table(titles, lines, left=2)


def ablations() -> str:
    """What one change makes of a short training from a pretrained backbone."""
    (base,) = runs("camvid/finetune/short_400", "miou")
    lines = []
    for name, change in ABLATIONS.items():
        (score,) = runs(f"camvid/finetune/{name}_400", "miou")
        lines.append([change, f"{100 * score:.2f}", f"{100 * (score - base):+.1f}"])
    return table(["change", "mIoU %", f"against {100 * base:.2f}"], lines)


def picture() -> Figure:
    """Peak memory of a step: the paper's network with both norms, and an unchanged network in five ways."""
    shown: dict[str, list[tuple[str, float, str, str]]] = {}  # title: name, bytes, times, colour
    of_switches = {
        "norm=std trainer.precision=bfloat16": ("standard batch norm", charts.BLACK),
        "trainer.precision=bfloat16": ("in-place ABN", charts.ORANGE),
    }
    steps = {row["switch"]: row for row in rows("steps", "h100")}
    bars_of_panel = shown.setdefault("ResNeXt-101 + DeepLabV3, 4 crops of 512², H100", [])
    for switch, (name, colour) in of_switches.items():
        eager, graphs = (median(steps[switch + end]["times_ms"]) for end in ("", " trainer.capture=true"))
        times = f"{eager:.0f} ms ({graphs:.0f} with CUDA graphs)"
        bars_of_panel.append((name, steps[switch]["peak_bytes"], times, colour))
    of_methods = {
        "plain": ("baseline", charts.BLACK),
        CHECKPOINTED: ("activation checkpointing", charts.VERMILION),
        "recompute_activations": ("keepless, no budget", charts.BLUE),
        PLANNED: ("keepless, budget of {budget:.1f} GiB", charts.BLUE),
        "the least": ("keepless, lowest budget", charts.BLUE),
    }
    bars_of_panel = shown.setdefault("ResNet-50, unchanged, 128 images of 224², H200", [])
    for method, (name, colour) in of_methods.items():
        row, eager, graphs = step_on_h200("resnet50", method)
        times = "1.00" if method == "plain" else f"{eager:.2f} ({graphs:.2f} with CUDA graphs)"
        name = name.format(budget=row.get("budget_bytes", 0) / GIB)
        bars_of_panel.append((name, row["peak_bytes"], f"time {times}", colour))
    figure, panels = charts.panels(1, len(shown), (13, 2.8))
    for axes, (title, bars) in zip(panels, shown.items(), strict=True):
        names, peaks, texts, colours = zip(*bars, strict=True)
        drawn = axes.barh(names, [peak / GIB for peak in peaks], color=colours, height=0.65)
        labels = [f"{peak / GIB:.1f} GiB, {text}" for peak, text in zip(peaks, texts, strict=True)]
        axes.bar_label(drawn, labels, padding=4)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(0, 2.6 * max(peaks) / GIB)  # room for the labels
        axes.set(title=title, xlabel="peak memory of a step in bfloat16, GiB")
    return figure


FUNCTIONS = (readme_costs, readme_scores, keepless_gpu, keepless_cpu, protocol, ablations)
SUMMARIES = {function.__name__: function for function in FUNCTIONS}
