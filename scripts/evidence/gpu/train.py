"""Part "train": CamVid with standard and in-place norms, at the same batch and at equal memory."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure

import train_seg
from engine.configuration.command_line import composed
from scripts.evidence.frame import prose
from scripts.evidence.gpu.part import Part, Rows, Setting, bars
from scripts.reports.markdown import Columns, columns, section

EQUAL = "in-place, larger crops at equal memory"
TRAININGS = {  # the rows of configs/experiment/camvid_table3, for images of half their size
    "standard": ("norm=std", "data.crop_size=120"),
    "in-place, same batch": ("norm=inplace", "data.crop_size=120"),
    EQUAL: ("norm=inplace", "data.crop_size=148"),
}
SEEDS = (0, 1, 2)
RECIPE = (
    *("experiment=camvid_table3/std", "data.base_size=240", "data.workers=12"),
    *("trainer.precision=bfloat16", "trainer.evaluate_every_epochs=30"),
)
TINY = (
    *("data.workers=0", "data.crops_per_minibatch=2", "norm.backend=eager"),
    *("trainer.steps=2", "trainer.evaluate_images=2"),
)


def items(setting: Setting) -> dict[str, tuple]:
    seeds = SEEDS[:1] if setting.rehearse else SEEDS
    return {f"{name.replace(', ', '-')}/{seed}": (name, seed) for seed in seeds for name in TRAININGS}


def measure(setting: Setting, name: str, seed: int) -> Rows:
    """A whole training: {"training", "seed", "miou", "seconds", "memory_mib": peak}."""
    if setting.camvid is None and not setting.rehearse:
        raise ValueError("part=train needs camvid=DIR, as scripts.evidence.gpu_pack writes it")
    started_s = time.monotonic()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        device = (f"trainer.device={setting.device}", f"run_dir={folder}/run", f"seed={seed}", *TRAININGS[name])
        data = TINY if setting.rehearse else (*RECIPE, f"data.root={setting.camvid}")
        results = train_seg.train(composed("train_seg", *data, *device))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    memory = [entry["peak_memory_mib"] for entry in map(json.loads, lines) if "peak_memory_mib" in entry]
    seconds = round(time.monotonic() - started_s, 1)
    row = {"training": name, "seed": seed, "miou": results["miou"], "seconds": seconds}
    return [{**row, "memory_mib": max(memory, default=0)}]


def _summaries(rows: Rows) -> Rows:
    """Mean and deviation of each training over its seeds."""
    found = []
    for name in dict.fromkeys(row["training"] for row in rows):
        own = [row for row in rows if row["training"] == name]
        scores = [100 * row["miou"] for row in own]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        seconds, memory = (statistics.median(row[kind] for row in own) for kind in ("seconds", "memory_mib"))
        summary = {"training": name, "seeds": len(own), "miou": statistics.mean(scores), "spread": spread}
        found.append({**summary, "seconds": seconds, "memory_mib": memory, "norm": name})
    return found


COLUMNS: Columns = [
    ("training", "{training}"),
    ("seeds", "{seeds}"),
    ("mIoU, %", "{miou:.2f} ± {spread:.2f}"),
    ("peak, MiB", "{memory_mib:.0f}"),
    ("s", "{seconds:.0f}"),
]


def sections(rows: Rows) -> Iterator[str]:
    yield section("Trainings", prose("gpu/train"), columns(_summaries(rows), COLUMNS))


def pictures(rows: Rows) -> Mapping[str, Figure]:
    values = {"mIoU, %": lambda row: 100 * row["miou"], "peak, MiB": lambda row: row["memory_mib"]}
    return bars([{**row, "seed": f"seed {row['seed']}"} for row in rows], "training", "seed", values)


PART = Part("CamVid, standard and in-place", 7, items, measure, sections, pictures)
