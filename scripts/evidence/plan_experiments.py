"""Plan the memory of the papers' experiments without a GPU:

    python -m scripts.evidence.plan_experiments out=docs/results/memory_plan.json

Writes FILE.json, FILE.md and FILE.png: what every experiment needs on each device; Table 3's columns fixed crop and
fixed batch as the planner fills them, beside the paper's; the memory with which each minibatch of Tables 3 and 4 fits
on one device; the crops that fit on devices of 8 to 141 GB; RevNet's claims. Traces are kept in the cache folder.
`measure=false` makes the page again from FILE.json.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine import planner
from engine.planner.trace import Trace
from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from engine.schema.memory import Memory, bytes_of
from scripts.evidence import frame, papers
from scripts.evidence.frame import Cells, columns, page_text, table
from scripts.plan_memory import combinations

COLUMNS = ("cityscapes_resnext101", "coco_stuff_resnext101", "cityscapes_wrn38", "coco_stuff_wrn38")
CARD_BODIES = ("cityscapes_resnext101_std", "cityscapes_wrn38_std")
LINE = (4, 16, 64)  # crops: a line through the first two, checked at the third
# The claims of RevNet's section 7.2. A unit has six layers: 2 + 6 * 100 are 602.
CLAIMS = {
    "ResNet-101": ("revnet/imagenet_resnet101", "trainer.accumulation_steps=1"),
    "RevNet-104": ("revnet/imagenet_revnet104",),
    "RevNet-602": ("revnet/imagenet_revnet104", "body.structure=[2,2,94,2]"),
}


@dataclass
class PlanArguments(frame.Arguments):
    """Arguments of the plan."""

    budget: str = "12GiB"  # of each of the papers' devices
    devices: int = key(4, above=0)  # of Table 3

    def check(self) -> None:
        """Raise ValueError for an impossible argument."""
        bytes_of("budget", self.budget)


def measure(arguments: PlanArguments, clock: frame.Clock) -> dict:
    """Make the record."""
    memory = (f"memory.budget={arguments.budget}", f"memory.gpus={arguments.devices}")
    found: dict[str, Any] = {"reserved": Memory().reserved()}
    for part, rows in {
        "experiments": _plan_experiments(),
        "fits": _plan_fits(memory),
        "one_device": _plan_one_device(),
        "cards": _plan_cards(),
        "claims": _plan_claims(memory[0]),
    }.items():
        found[part] = list(rows)
        clock.report(part)
    return found


def planned(experiment: str) -> dict:
    """What a step of an experiment needs on each of its devices."""
    config, devices = papers.configured_as(experiment), papers.devices_of(experiment)
    share, size = planner.share_of(config, devices), config.data.crop_size
    trace = planner.step_memory(config, share, size, devices)
    crops = {"crops": config.data.crops_per_minibatch, "share": share, "crop_size": size}
    return {"experiment": experiment, "devices": devices, **crops, **_numbers(trace)}


def _numbers(trace: Trace) -> dict:
    return {"peak": trace.peak, "kept": sum(trace.saved.values()), "at_peak": trace.at_peak, "place": trace.place}


def _plan_experiments() -> Iterator[dict]:
    for name in papers.all_experiments():
        yield planned(name)


def _plan_fits(memory: tuple[str, ...]) -> Iterator[dict]:
    """The planner's choices for Table 3, and what the paper's choice and the next larger one need."""
    for column in COLUMNS:
        for fit, row in FITS.items():
            for norm in ("std", "inplace"):
                config = papers.configured_as(f"table3/{column}_std", f"norm={norm}", *memory, f"memory.fit={fit}")
                devices = config.memory.gpus or 1
                chosen = planner.fitting(config, devices).data
                name = f"table3/{column}_std" if norm == "std" else f"table3/{column}_inplace_{row}"
                paper = papers.configured_as(name)
                share, size = planner.share_of(paper, devices), paper.data.crop_size
                larger = (share + 1, size) if fit == "batch" else (share, size + 8)
                yield {
                    **{"column": column, "fit": fit, "norm": norm},
                    **{"crops": chosen.crops_per_minibatch, "crop_size": chosen.crop_size},
                    **{"paper_crops": paper.data.crops_per_minibatch, "paper_crop_size": size},
                    "paper_peak": planner.step_memory(paper, share, size, devices).peak,
                    "larger_peak": planner.step_memory(paper, *larger, devices).peak,
                }


def _plan_one_device() -> Iterator[dict]:
    """Each minibatch of Tables 3 and 4 as a whole on one device."""
    done = set()
    for name in papers.all_experiments():
        if (network := re.match(r"table[34]/(\w+?_(resnext\d+|wrn\d+))_", name)) is None:
            continue
        config = papers.configured_as(name)
        crops, size = config.data.crops_per_minibatch, config.data.crop_size
        if (network[1], crops, size) in done:
            continue
        done.add((network[1], crops, size))
        row = {"network": network[1], "crops": crops, "crop_size": size}
        for combination, changed in combinations(config).items():
            yield {**row, "combination": combination, "peak": planner.step_memory(changed, crops, size).peak}


def _plan_cards() -> Iterator[dict]:
    """Memory as a line over the number of crops."""
    for name in CARD_BODIES:
        config = papers.configured_as(f"table3/{name}")
        for combination, changed in combinations(config).items():
            peaks = [planner.step_memory(changed, crops, config.data.crop_size).peak for crops in LINE]
            each = (peaks[1] - peaks[0]) / (LINE[1] - LINE[0])
            base = peaks[0] - LINE[0] * each
            error = (base + LINE[2] * each) / peaks[2] - 1
            row = {"network": name.removesuffix("_std"), "crop_size": config.data.crop_size, "combination": combination}
            yield {**row, "base": round(base), "each": round(each), "error": error}


def _plan_claims(budget: str) -> Iterator[dict]:
    for network, overrides in CLAIMS.items():
        config = papers.configured_as(*overrides, budget, "memory.fit=batch")
        assert isinstance(config, ClassificationRun)
        yield {"network": network, "images": planner.fitting(config, devices=1).data.crops_per_minibatch}


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw its chart to `picture`."""
    chart(result).savefig(picture, dpi=110)
    return markdown(result, picture.name)


GIB = 2**30
TITLES = {
    "cityscapes_resnext101": "Cityscapes, ResNeXt-101",
    "coco_stuff_resnext101": "COCO-Stuff, ResNeXt-101",
    "cityscapes_wrn38": "Cityscapes, WideResNet-38",
    "coco_stuff_wrn38": "COCO-Stuff, WideResNet-38",
    "cityscapes_resnext152": "Cityscapes, ResNeXt-152",
    "vistas_wrn38": "Vistas, WideResNet-38",
}
CARDS_GB = (8, 11, 12, 16, 24, 32, 40, 48, 80, 141)
FITS = {"batch": "fixed_crop", "crop": "fixed_batch"}  # memory.fit -> the row of Table 3
CATEGORIES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "weights": "#000000",
    "average": "#999999",
    "momentum": "#0072B2",
    "gradients": "#56B4E9",
    "images": "#F0E442",
    "activations": "#E69F00",
    "temporary": "#D55E00",
}
PUBLISHED_CLAIMS = {"ResNet-101": "32", "RevNet-104": "128 (64 used in training)", "RevNet-602": "“trains”"}

METHOD = """
- Each number comes from a training step that is traced on fake tensors, which have shapes but no memory: see
  `engine/planner/trace.py`. Tests compare traces with real steps to the byte.
- *Memory* of an experiment is what PyTorch's tensors take on one device at the worst moment. CUDA's context and the
  workspaces of convolutions come on top. Where a page speaks of devices of some size, both are taken off or added with
  the defaults of `memory.context` and `memory.workspace`.
- With several devices, DistributedDataParallel holds memory for all gradients throughout.
- The operators are the CPU's and the layers' eager ones. Fused layers on CUDA need less temporary memory; autocast has
  a list of its own for each kind of device; memory inside operators is not seen; `trainer.compile` is not planned.
"""


def markdown(result: dict, picture: str) -> str:
    """The page's text."""
    sections = [
        *_table_3(result["fits"], result["arguments"]["budget"]),
        *_one_device(result["one_device"], result["reserved"]),
        *_cards(result["cards"], result["reserved"]),
        *_claims(result["claims"], result["arguments"]["budget"]),
        *["", f"![memory of experiments by category, and crops that fit by memory]({picture})"],
        *_experiments(result["experiments"]),
    ]
    about = f"{len(result['experiments'])} experiments"
    return page_text(result, "Planned memory of the papers' experiments", about, sections, METHOD)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _table_3(fits: list[dict], budget: str) -> Iterator[str]:
    yield from ["", "## Table 3: what fits", ""]
    yield (
        f"What fits on four devices of {budget}. *Fixed crop* keeps the crop size of the paper's first row and adds "
        "crops. *Fixed batch* keeps the number of crops and enlarges them, in steps of 8 pixels. The percentage says "
        "how many more pixels in-place norms allow in a minibatch. The last two columns check the assumed budget: the "
        "planner chooses exactly what the paper chose if a device has between *from* and *to* GiB for tensors."
    )
    yield ""
    titles = ["", "", "norm", "planned", "", "published", "", "from", "to"]
    yield from table(titles, _fit_rows(fits), left=3)
    fixed_crop = [row for row in fits if row["fit"] == "batch"]
    exact = {
        row["paper_peak"]: sum(_gives_paper(other, row["paper_peak"]) for other in fixed_crop) for row in fixed_crop
    }
    best = max(exact, key=lambda budget: exact[budget])
    yield ""
    yield (
        f"No budget gives all of the paper's choices, but {_gib(best)} GiB for tensors give {exact[best]} of its "
        f"{len(fixed_crop)} at a fixed crop. Workspaces and the framework of 2017 may have taken the rest."
    )


def _gives_paper(row: dict, budget: float) -> bool:
    return row["paper_peak"] <= budget < row["larger_peak"]


def _fit_rows(fits: list[dict]) -> Iterator[list[str]]:
    standard: dict = {}
    for row in fits:
        if row["norm"] == "std":
            standard = row
        cells = [TITLES[row["column"]], FITS[row["fit"]].replace("_", " "), row["norm"]]
        for of in ("", "paper_"):
            crops, size = row[f"{of}crops"], row[f"{of}crop_size"]
            more = crops * size**2 / (standard[f"{of}crops"] * standard[f"{of}crop_size"] ** 2) - 1
            cells += [f"{crops} x {size}²", f"{more:+.0%}" if row["norm"] != "std" else ""]
        yield [*cells, _gib(row["paper_peak"]), _gib(row["larger_peak"])]


def _one_device(rows: list[dict], reserved: int) -> Iterator[str]:
    yield from ["", "## A minibatch of Tables 3 and 4 on one device", ""]
    yield (
        f"The least memory of a device, GiB, on which the whole minibatch fits, so that norms see all crops without "
        f"synchronisation; {_gib(reserved)} of it are CUDA's own. In each cell: float32 / bfloat16."
    )
    yield ""
    networks: dict[tuple, dict[str, list[str]]] = {}
    for row in rows:
        combination, _, precision = row["combination"].rpartition(", ")
        cells = networks.setdefault((row["network"], row["crops"], row["crop_size"]), {})
        cells.setdefault(combination, []).append(f"{(row['peak'] + reserved) / GIB:.1f}")
    titles = ["", "crops", *_columns(networks.values())]
    lines = [
        [TITLES[name], f"{crops} x {size}²", *(" / ".join(cells) for cells in found.values())]
        for (name, crops, size), found in networks.items()
    ]
    yield from table(titles, lines, left=2)


def _columns(rows: Iterable[dict[str, list[str]]]) -> list[str]:
    return list(next(iter(rows)))


def _cards(rows: list[dict], reserved: int) -> Iterator[str]:
    yield from ["", "## Crops on devices of 8 to 141 GB", ""]
    worst = max(abs(row["error"]) for row in rows)
    yield (
        f"How many crops fit on one device. The memory of 4 and of 16 crops gives a straight line, from which the "
        f"table is computed; at 64 crops the line is off by {worst:.1%} at most. 1 GB is 10⁹ bytes."
    )
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        yield from ["", f"{TITLES[network]}, {own[0]['crop_size']}²:", ""]
        lines = [[row["combination"], *(str(crops_on(row, gb, reserved) or "–") for gb in CARDS_GB)] for row in own]
        yield from table(["", *map(str, CARDS_GB)], lines)


def crops_on(row: dict, gigabytes: float, reserved: int) -> int:
    """The crops that fit on a device by the line of a row; 0 if none do."""
    return max(0, int((gigabytes * 10**9 - reserved - row["base"]) // row["each"]))


def _claims(rows: list[dict], budget: str) -> Iterator[str]:
    yield from ["", "## RevNet's claims", ""]
    yield (
        f"The most ImageNet images of 224² on one device of {budget}, standard norms in float32; the paper (section 7) "
        "had TensorFlow of 2017 on devices of the same size."
    )
    yield ""
    cells: Cells = {
        "": lambda row: row["network"],
        "images": lambda row: str(row["images"]),
        "published": lambda row: PUBLISHED_CLAIMS[row["network"]],
    }
    yield from columns(rows, cells)


def _experiments(rows: list[dict]) -> Iterator[str]:
    yield from ["", "## Every experiment", ""]
    yield "GiB on one device: *memory* is the peak, and *kept* is what autograd holds for the backward pass."
    yield ""
    cells: Cells = {
        "experiment": lambda row: row["experiment"],
        "devices": lambda row: str(row["devices"]),
        "crops on each": lambda row: f"{row['share']} x {row['crop_size']}²",
        "memory": lambda row: _gib(row["peak"]),
        "kept": lambda row: _gib(row["kept"]),
        "most in": lambda row: row["place"],
    }
    yield from columns(sorted(rows, key=lambda row: row["experiment"]), cells)


def chart(result: dict) -> Figure:
    """Memory by category beside the crops that fit by memory."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, [row for row in result["experiments"] if row["experiment"].startswith(("table3/", "table4/"))])
    _lines(right, result["cards"], result["reserved"])
    return figure


def _bars(axes: Axes, rows: list[dict]) -> None:
    names = [row["experiment"] for row in rows][::-1]
    start = [0.0] * len(rows)
    for category, colour in CATEGORIES.items():
        sizes = [row["at_peak"].get(category, 0) / GIB for row in rows][::-1]
        if any(sizes):
            axes.barh(names, sizes, left=start, color=colour, label=category)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("GiB of tensors on each of four devices, at the peak")
    axes.legend(fontsize=7)


def _lines(axes: Axes, rows: list[dict], reserved: int) -> None:
    chosen = [row for row in rows if row["network"] == rows[0]["network"]]
    colours = ["#000000", "#0072B2", "#999999", "#56B4E9", "#D55E00"]
    gigabytes = [6, *range(8, 81, 2)]
    for number, row in enumerate(chosen):
        crops = [crops_on(row, gb, reserved) for gb in gigabytes]
        style = "--" if row["combination"].endswith("bfloat16") else "-"
        axes.plot(gigabytes, crops, style, color=colours[number // 2 % len(colours)], label=row["combination"])
    axes.set_xlabel("GB of the device")
    axes.set_ylabel(f"crops of {chosen[0]['crop_size']}² that fit: {TITLES[chosen[0]['network']]}")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


run, main = frame.benchmark("evidence.plan_experiments", PlanArguments, measure, page)

if __name__ == "__main__":
    main()
