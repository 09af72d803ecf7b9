"""Plan the memory of the papers' experiments without a GPU:

    python -m scripts.plan_experiments out=docs/results/memory_plan.json

Writes FILE.json, FILE.md and FILE.png: what every experiment needs on each device; Table 3's columns fixed crop and
fixed batch as the planner fills them, beside the paper's; the memory with which each minibatch of Tables 3 and 4 fits
on one device; the crops that fit on devices of 8 to 141 GB; RevNet's claims. Traces are kept in the cache folder.
`measure=false` makes the page again from FILE.json.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import planner
from engine.planner.trace import Trace
from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from engine.schema.memory import Memory, bytes_of
from scripts import papers
from scripts.bench import frame
from scripts.plan_experiments_page import FITS, chart, markdown
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
        "experiments": _experiments(),
        "fits": _fits(memory),
        "one_device": _one_device(),
        "cards": _cards(),
        "claims": _claims(memory[0]),
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


def _experiments() -> Iterator[dict]:
    for name in papers.all_experiments():
        yield planned(name)


def _fits(memory: tuple[str, ...]) -> Iterator[dict]:
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


def _one_device() -> Iterator[dict]:
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


def _cards() -> Iterator[dict]:
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


def _claims(budget: str) -> Iterator[dict]:
    for network, overrides in CLAIMS.items():
        config = papers.configured_as(*overrides, budget, "memory.fit=batch")
        assert isinstance(config, ClassificationRun)
        yield {"network": network, "images": planner.fitting(config, devices=1).data.crops_per_minibatch}


def page(result: dict, picture: Path) -> str:
    """Make the page, and draw its chart to `picture`."""
    chart(result).savefig(picture, dpi=110)
    return markdown(result, picture.name)


run, main = frame.benchmark("plan_experiments", PlanArguments, measure, page)

if __name__ == "__main__":
    main()
