"""Plan the memory of the papers' experiments without a GPU:

    python -m scripts.evidence.plan_experiments out=docs/results/memory_plan.json
    python -m scripts.evidence.plan_experiments only=[experiments] out=docs/results/memory_plan.json
    python -m scripts.evidence.plan_experiments out=docs/results/memory_plan.json measure=false

Plans the memory of every experiment on each device; Table 3's columns fixed crop (memory.fit=batch) and fixed batch
(memory.fit=crop) as the planner fills them, beside the paper's, on which the keys `memory.*` are calibrated; the memory
with which each minibatch of Tables 3 and 4 fits on one device; the crops that fit on devices of 8 to 141 GB; RevNet's
claims. What is compared with the paper has the paper's loss, with logits of full resolution (loss.tiles=false); what
the loss by tiles changes stands beside it. Traces are kept in the cache folder.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from engine import planner
from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from engine.schema.memory import Memory
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from scripts.evidence import frame
from scripts.evidence.frame import GIB
from scripts.plan_memory import combinations
from scripts.reports import charts, papers
from scripts.reports.markdown import Columns, columns, table

COLUMNS = ("cityscapes_resnext101", "coco_stuff_resnext101", "cityscapes_wrn38", "coco_stuff_wrn38")
CARD_BODIES = ("cityscapes_resnext101_std", "cityscapes_wrn38_std")
PARTS = ("experiments", "fits", "one_device", "cards", "claims")
IN_FULL = "standard norms, loss.tiles=false"
LINE = (4, 16, 64)  # crops: a line through the first two, checked at the third
# The claims of RevNet's section 7.2. A unit has six layers: 2 + 6 * 100 are 602.
CLAIMS = {
    "ResNet-101": ("revnet/imagenet_resnet101", "trainer.accumulation_steps=1"),
    "RevNet-104": ("revnet/imagenet_revnet104",),
    "RevNet-602": ("revnet/imagenet_revnet104", "body.structure=[2,2,94,2]"),
}


@dataclass
class PlanArguments(frame.Arguments):
    budget: str = "12GiB"  # of each of the papers' devices
    devices: int = key(4, above=0)  # of Table 3
    only: list[str] = field(default_factory=list)  # parts to plan again: the record keeps the others; []: all

    def check(self) -> None:
        if self.only:
            frame.check_choices("only", self.only, PARTS)
        Memory(budget=self.budget, gpus=self.devices).check()


def measure(arguments: PlanArguments, clock: frame.Clock) -> Iterator[dict]:
    memory = (f"memory.budget={arguments.budget}", f"memory.gpus={arguments.devices}")
    device = Memory(budget=arguments.budget)
    own = frame.provenance()
    before = frame.begun(arguments, own) if arguments.only else {}
    found: dict[str, Any] = {"deductions": device.deductions(arguments.devices)}
    found["available"] = device.available(arguments.devices)
    planners = (map(planned, papers.all_experiments()), _plan_fits(memory), _plan_one_device(), _plan_cards())
    chosen, arguments.only = arguments.only or PARTS, []  # the record is as of a call for all parts
    for part, rows in zip(PARTS, (*planners, _plan_claims(memory[0])), strict=True):
        found[part] = list(rows) if part in chosen else before[part]
        clock.report(part)
    seconds = round(before.get("seconds", 0) + clock.seconds, 1)
    yield found | {"seconds": seconds, "environment": {"commit": frame.commits(before, own)}}


def planned(experiment: str) -> dict:
    """Memory of a training step of an experiment, on each of its devices."""
    tiled, devices = papers.configured_as(experiment), papers.devices_of(experiment)
    config, share, size = in_full(tiled), planner.share_of(tiled, devices), tiled.data.crop_size
    trace = planner.step_memory(config, share, size, devices)
    crops = {"crops": config.data.crops_per_minibatch, "share": share, "crop_size": size}
    memory = {"peak": trace.peak, "kept": sum(trace.saved.values()), "at_peak": trace.at_peak, "place": trace.place}
    by_tiles = planner.step_memory(tiled, share, size, devices) if config is not tiled else None
    memory["by_tiles"] = by_tiles and {"peak": by_tiles.peak, "temporary": by_tiles.at_peak.get("temporary", 0)}
    return {"experiment": experiment, "devices": devices, **crops, **memory}


def in_full(config: TrainingRun) -> TrainingRun:
    """The configuration with the paper's loss, on logits of the labels' resolution; classifiers are unchanged."""
    if not isinstance(config, SegmentationRun):
        return config
    changed = deepcopy(config)
    changed.loss.tiles = False
    return changed


def _plan_fits(memory: tuple[str, ...]) -> Iterator[dict]:
    """The planner's choices for Table 3, and the memory of the paper's choice and of the next larger one."""
    for column in COLUMNS:
        for fit, row in FITS.items():
            for norm in ("std", "inplace"):
                config = papers.configured_as(f"table3/{column}_std", f"norm={norm}", *memory, f"memory.fit={fit}")
                devices = config.memory.gpus or 1
                chosen, tiled = (planner.fitting(loss, devices).data for loss in (in_full(config), config))
                name = f"table3/{column}_std" if norm == "std" else f"table3/{column}_inplace_{row}"
                paper = in_full(papers.configured_as(name))
                share, size = planner.share_of(paper, devices), paper.data.crop_size
                larger = (share + 1, size) if fit == "batch" else (share, size + 8)
                yield {
                    **{"column": column, "fit": fit, "norm": norm},
                    **{"crops": chosen.crops_per_minibatch, "crop_size": chosen.crop_size},
                    **{"tiled_crops": tiled.crops_per_minibatch, "tiled_crop_size": tiled.crop_size},
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
        tiled = combinations(config)
        standard = {f"{IN_FULL}, {name.rpartition(', ')[2]}": in_full(tiled[name]) for name in list(tiled)[:2]}
        for combination, changed in (standard | tiled).items():
            needed = Memory().needed(planner.needed(changed, crops, size), devices=1)
            yield {**row, "combination": combination, "device": needed}


def _plan_cards() -> Iterator[dict]:
    """The memory of a device as a line over the number of crops."""
    for name in CARD_BODIES:
        config = papers.configured_as(f"table3/{name}")
        for combination, changed in combinations(config).items():
            peaks = [planner.needed(changed, crops, config.data.crop_size) for crops in LINE]
            needed = [Memory().needed(peak, devices=1) for peak in peaks]
            each = (needed[1] - needed[0]) / (LINE[1] - LINE[0])
            base = needed[0] - LINE[0] * each
            error = (base + LINE[2] * each) / needed[2] - 1
            row = {"network": name.removesuffix("_std"), "crop_size": config.data.crop_size, "combination": combination}
            yield {**row, "base": round(base), "each": round(each), "error": error}


def _plan_claims(budget: str) -> Iterator[dict]:
    for network, overrides in CLAIMS.items():
        config = papers.configured_as(*overrides, budget, "memory.fit=batch")
        assert isinstance(config, ClassificationRun)
        yield {"network": network, "images": planner.fitting(config, devices=1).data.crops_per_minibatch}


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
CATEGORIES = {
    "weights": charts.BLACK,
    "average": charts.GREY,
    "momentum": charts.BLUE,
    "gradients": charts.SKY,
    "images": charts.YELLOW,
    "activations": charts.ORANGE,
    "temporary": charts.VERMILION,
}
COLOURS = {  # of float32 and bfloat16 each
    "standard norms": charts.BLACK,
    "in-place norms": charts.BLUE,
    "standard norms, trainer.recompute=sqrt": charts.GREY,
    "in-place norms, trainer.recompute=sqrt": charts.SKY,
    "standard norms, trainer.recompute=budget": charts.YELLOW,
    "in-place norms, trainer.recompute=budget": charts.ORANGE,
    "in-place norms, body=revnet104": charts.VERMILION,
}
PUBLISHED_CLAIMS = {"ResNet-101": "32", "RevNet-104": "128 (64 used in training)", "RevNet-602": "“trains”"}


def page(result: dict, name: str) -> str:
    return frame.page_text(
        "plan_experiments",
        result,
        picture=f"![memory of experiments by category, and crops that fit by memory]({name}.png)",
        count=len(result["experiments"]),
        table_3=_table_3(result["fits"]),
        **_calibration(result),
        one_device=_one_device(result["one_device"]),
        largest_error=max(abs(row["error"]) for row in result["cards"]),
        cards=list(_cards(result["cards"])),
        claims=columns(result["claims"], CLAIM),
        experiments=columns(sorted(result["experiments"], key=lambda row: row["experiment"]), EXPERIMENT),
    )


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


CLAIM: Columns = [
    ("", "{network}"),
    ("images", "{images}"),
    ("published", lambda row: PUBLISHED_CLAIMS[row["network"]]),
]
EXPERIMENT: Columns = [
    ("experiment", "{experiment}"),
    ("devices", "{devices}"),
    ("crops on each", "{share} x {crop_size}²"),
    ("memory", lambda row: _gib(row["peak"])),
    ("kept", lambda row: _gib(row["kept"])),
    ("by tiles", lambda row: row["by_tiles"] and _gib(row["by_tiles"]["peak"]) or ""),
    ("most in", "{place}"),
]
FIT: Columns = [
    ("", lambda row: TITLES[row["column"]]),
    ("", lambda row: FITS[row["fit"]].replace("_", " ")),
    ("norm", "{norm}"),
    ("planned", "{crops} x {crop_size}²"),
    ("", lambda row: _more(row, "")),
    ("published", "{paper_crops} x {paper_crop_size}²"),
    ("", lambda row: _more(row, "paper_")),
    ("difference", lambda row: f"{row['crops'] * row['crop_size'] ** 2 / _pixels_of_paper(row) - 1:+.0%}"),
    ("from", lambda row: _gib(row["paper_peak"])),
    ("to", lambda row: _gib(row["larger_peak"])),
    ("by tiles", "{tiled_crops} x {tiled_crop_size}²"),
    ("", lambda row: _more(row, "tiled_")),
]


def _more(row: dict, by: str) -> str:
    """How many more pixels a minibatch has than with standard norms."""
    ours, standard = (found[f"{by}crops"] * found[f"{by}crop_size"] ** 2 for found in (row, row["standard"]))
    return "" if row["norm"] == "std" else f"{ours / standard - 1:+.0%}"


def _pixels_of_paper(row: dict) -> int:
    return row["paper_crops"] * row["paper_crop_size"] ** 2


def _table_3(fits: list[dict]) -> str:
    standard = {(row["column"], row["fit"]): row for row in fits if row["norm"] == "std"}
    return columns(({**row, "standard": standard[row["column"], row["fit"]]} for row in fits), FIT, left=3)


def _calibration(result: dict) -> dict[str, object]:
    """How well the defaults of `memory.*` reproduce the paper's choices."""
    fits, available = result["fits"], result["available"]
    larger = sorted(
        f"{row['experiment']} {_gib(row['peak'])}"
        for row in result["experiments"]
        if re.match("table[124]/(?!release)", row["experiment"]) and row["peak"] > available
    )
    return {
        "deductions": result["deductions"],
        "available": _gib(available),
        "most": _gib(max(row["paper_peak"] for row in fits)),
        "exact": sum(row["paper_peak"] <= available < row["larger_peak"] for row in fits),
        "fits": len(fits),
        "larger": ", ".join(larger),
    }


def _one_device(rows: list[dict]) -> str:
    networks: dict[tuple, dict[str, list[str]]] = {}
    for row in rows:
        combination, _, precision = row["combination"].rpartition(", ")
        cells = networks.setdefault((TITLES[row["network"]], f"{row['crops']} x {row['crop_size']}²"), {})
        cells.setdefault(combination, []).append(f"{row['device'] / GIB:.1f}")
    titles = ["", "crops", *next(iter(networks.values()))]
    return table(titles, ([*network, *map(" / ".join, cells.values())] for network, cells in networks.items()), 2)


def _cards(rows: list[dict]) -> Iterator[str]:
    """For each network its name and the crops of each combination on each device."""
    crops = [(str(gb), lambda row, gb=gb: str(crops_on(row, gb) or "–")) for gb in CARDS_GB]
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        yield f"{TITLES[network]}, {own[0]['crop_size']}²:"
        yield columns(own, [("", "{combination}"), *crops])


def crops_on(row: dict, gigabytes: float) -> int:
    """The crops that fit on a device by the line of a row; 0 if none do."""
    return max(0, int((gigabytes * 10**9 - row["base"]) // row["each"]))


def pictures(result: dict) -> dict[str, Figure]:
    """Memory by category beside the crops that fit by memory."""
    figure, (left, right) = charts.panels(1, 2, (12, 6.2))
    planned = {row["experiment"]: row for row in result["experiments"]}
    rows = [planned[name] for table in ("table3", "table4") for name in papers.experiments_of(table)]
    parts = [
        charts.Series(category, [row["at_peak"].get(category, 0) / GIB for row in rows], colour=colour)
        for category, colour in CATEGORIES.items()
    ]
    about = "GiB of tensors on each of four devices, at the peak"
    names = [row["experiment"] for row in rows]
    charts.stacked_bars(left, names, [part for part in parts if any(part.y)], xlabel=about)
    cards = [row for row in result["cards"] if row["network"] == result["cards"][0]["network"]]
    gigabytes = range(6, max(CARDS_GB) + 1)
    lines = []
    for row in cards:
        about, _, precision = row["combination"].rpartition(", ")
        label, style = (about, "-") if precision == "float32" else (f"_{row['combination']}", "--")  # _: no entry
        crops = [crops_on(row, gb) for gb in gigabytes]
        lines.append(charts.Series(label, crops, gigabytes, COLOURS[about], style))
    about = f"crops of {cards[0]['crop_size']}² that fit: {TITLES[cards[0]['network']]}"
    charts.lines(right, lines, xlabel="GB of the device; dashed: bfloat16", ylabel=about)
    right.set(xscale="log", yscale="log")
    for axis, ticks in ((right.xaxis, (8, 12, 16, 24, 32, 48, 80, 141)), (right.yaxis, [2**n for n in range(10)])):
        axis.set_ticks(ticks, labels=list(map(str, ticks)))
        axis.set_ticks([], minor=True)
    for axes in (left, right):  # below the panels, where it covers nothing
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
    return {"": figure}


run, main = frame.benchmark("plan_experiments", PlanArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
