"""The small tables of README.md and docs/results/camvid.md, from the records: each is a block of its page."""

import json
from collections.abc import Iterator
from functools import cache
from statistics import mean, median
from typing import Any

from benchmarks.frame import RESULTS
from benchmarks.rows import GIB, MIB, ratio_of, relative
from scripts.reports.markdown import mean_of, table

STD, BFLOAT16, GRAPHS = "norm=std", "trainer.precision=bfloat16", "trainer.capture=true"
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
SHOWN = {  # of these, in the README
    "std": "standard norms",
    "inplace_larger_crops": "in-place ABN, larger crops",
    "recompute_larger_crops": "recomputed activations, larger crops",
    "std_equal_time": "standard norms, more steps",
}
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
    (items,) = (each["items"] for each in record(name)["calls"] if each["name"] == call)
    return (row for own in items.values() for row in own if row.items() >= keys.items())


def runs(folder: str, *path: str) -> list[Any]:
    """A value in the results of a run and of its repetitions with other seeds."""
    found = []
    for each in sorted([RESULTS / folder, *RESULTS.glob(f"{folder}_seed*")]):
        value = record((each / "results").relative_to(RESULTS).as_posix())
        for key in path:
            value = value[key]
        found.append(value)
    return found


def miou(folder: str, digits: int = 2) -> str:
    """Mean and standard deviation over seeds, in %."""
    return mean_of([100 * score for score in runs(folder, "miou")], digits)


def readme_step() -> str:
    """Memory and time of a step of Table 3's network with standard and with in-place norms."""

    def own(norms: str, *switches: str) -> dict[str, Any]:
        switch = " ".join([STD, BFLOAT16, *switches] if norms == "standard" else [BFLOAT16, *switches])
        items = next(call["items"] for call in record("steps")["calls"] if call["name"] == "h100")
        return next(row for row in items[f"start1/{norms}"] if row["switch"] == switch)

    both = [(own(norms), own(norms, GRAPHS)) for norms in ("standard", "in-place")]
    times = [[f"{median(row['times_ms']):.0f} ms" for row in regimes] for regimes in both]
    lines = [
        ["peak memory, without CUDA graphs", *(f"{eager['peak_bytes'] / GIB:.1f} GiB" for eager, _ in both)],
        ["time, without CUDA graphs", *(eager for eager, _ in times)],
        ["reserved memory, with CUDA graphs", *(f"{graphs['reserved_bytes'] / GIB:.1f} GiB" for _, graphs in both)],
        ["time with CUDA graphs, the default on one GPU", *(graphs for _, graphs in times)],
    ]
    return table(["", "standard batch norm", "in-place ABN"], lines)


def readme_networks() -> str:
    """Times of checkpointing, and of a plan within its memory, relative to the baseline."""

    def on_h200(network: str, method: str) -> str:
        found = {row["method"]: row for row in rows("networks", "h200", network=network, precision="bfloat16")}
        ours, base = found[method], found["plain"]
        eager, graphs = (ratio_of(ours[key], base[key]).median for key in ("times_ms", "captured_ms"))
        return f"{eager:.2f} and {graphs:.2f}"

    def on_cpu(call: str, method: str) -> list[float]:
        base = {row["network"]: row for row in rows("networks", call, method="plain")}
        ratios = (relative(row, base[row["network"]], "times_ms") for row in rows("networks", call, method=method))
        return [ratio.median for ratio in ratios if ratio is not None]

    titles = {"resnet50": "ResNet-50", "densenet121": "DenseNet-121"}
    lines = [
        [f"{title}, without and with CUDA graphs", *(on_h200(name, method) for method in (CHECKPOINTED, PLANNED))]
        for name, title in titles.items()
    ]
    for call, kind in (("cpu", "image networks"), ("transformers", "transformers")):
        both = [on_cpu(call, method) for method in (CHECKPOINTED, PLANNED)]
        lines.append([f"median of {len(both[0])} {kind}", *(f"{median(own):.2f}" for own in both)])
    return table(["", "checkpointing every block", "`keepless` with a budget"], lines)


def readme_camvid() -> str:
    """Memory and scores of Table 3's protocol on CamVid."""
    lines = []
    for name, title in SHOWN.items():
        folder = f"{CAMVID}/{name}"
        memory_mib = mean(runs(folder, "training", "peak_memory_mib"))
        lines.append([title, f"{memory_mib:.0f} MiB", miou(folder, digits=1)])
    return table(["", "memory", "mIoU"], lines)


def protocol() -> str:
    """The rows of Table 3's protocol on CamVid from a pretrained backbone."""
    lines = []
    for name, (norms, crops) in PROTOCOL.items():
        folder = f"{CAMVID}/{name}"
        (steps,) = {*runs(folder, "config", "trainer", "steps")}
        (planned,) = rows("memory_plan", "all", experiment=f"camvid_table3_trained/{name}")
        minutes = mean(runs(folder, "training", "minutes"))
        lines.append([norms, crops, f"{steps}", f"{planned['by_tiles'] / MIB:.0f}", f"{minutes:.1f}", miou(folder)])
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


SUMMARIES = {own.__name__: own for own in (readme_step, readme_networks, readme_camvid, protocol, ablations)}
