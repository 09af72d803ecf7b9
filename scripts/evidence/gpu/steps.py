"""Part "steps": whole training steps of Table 3's networks, with every way to take less memory."""

import statistics
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import nn

from keepless import recompute_activations
from scripts.evidence.frame import MIB, mib, prose
from scripts.evidence.gpu.part import Part, Rows, Setting, bars, beside, relative_text
from scripts.evidence.measuring import PRECISIONS, compiled
from scripts.evidence.training_steps import PLAIN, Training
from scripts.reports.markdown import Columns, columns, section

RECIPES = {"resnext101": "cityscapes_resnext101", "wrn38": "cityscapes_wrn38"}  # of Table 3
CROPS = {"resnext101": 4, "wrn38": 5}  # of 512x512 on each of four devices, as in the first rows
STANDARD, INPLACE, COMPILED = "standard", "in-place", "standard, compiled, budget 0.5"
BUDGET = 0.5  # of the plain network's peak
METHODS = {  # name: overrides
    STANDARD: ("norm=std",),
    INPLACE: ("norm=inplace",),
    "standard, recomputed": ("norm=std", "trainer.recompute=activations"),
    "standard, blocks": ("norm=std", "trainer.recompute=blocks"),
    f"standard, budget {BUDGET}": ("norm=std",),
    COMPILED: ("norm=std",),
}
WARM_UP_STEPS = 3


def overrides(setting: Setting, body: str, crops: int, *more: str) -> tuple[str, ...]:
    """Overrides of train_seg.py: a network of Table 3 on drawn scenes, scaled to fill the crops."""
    data = ("data=synthetic", "data.workers=0", f"data.crops_per_minibatch={crops}")
    if setting.rehearse:
        small = ("body.base_channels=[8,8,16]", "body.stem_channels=8", "norm.backend=eager", "data.crop_size=48")
        return (*data, *small, "trainer.device=cpu", "trainer.precision=float32", *more)
    recipe = (f"experiment=table3/{RECIPES[body]}_std", *data, "data.base_size=512", "data.crop_size=512")
    return (*recipe, "trainer.device=cuda", "trainer.precision=float32", *more)


def items(setting: Setting) -> dict[str, tuple]:
    """The compiled networks come last: they take minutes to compile."""
    bodies = ("resnext101",) if setting.rehearse else RECIPES
    found = [(body, precision, method) for precision in PRECISIONS for body in bodies for method in METHODS]
    return {"/".join(item).replace(", ", "-"): item for item in sorted(found, key=lambda item: item[2] == COMPILED)}


def measure(setting: Setting, body: str, precision: str, method: str) -> Rows:
    """{"network", "method", "times_ms", "first_step_s", "saved_bytes", "peak_bytes": after the third step, "loss"}"""
    crops = 2 if setting.rehearse else CROPS[body]
    shared = overrides(setting, body, crops, f"trainer.precision={precision}", *METHODS[method])
    training = Training(shared, PLAIN, torch.get_num_threads())
    learner = training.learner
    if method == COMPILED:
        learner.forward = learner.forward.through(cast(nn.Module, compiled(learner.network, setting.compiler, BUDGET)))
    elif method.endswith(f"budget {BUDGET}"):
        recompute_activations(learner.network, budget=BUDGET)
    first_step_s = training.warm_up(WARM_UP_STEPS)["first_step_s"]
    times_ms = [training.step() for _ in range(setting.rounds(20))]
    facts = training.facts()
    kept = {name: facts[name] for name in ("saved_bytes", "peak_bytes", "loss")}
    network = f"{body}, {precision}"
    return [{"network": network, "method": method, "times_ms": times_ms, "first_step_s": first_step_s, **kept}]


def _ms(row: dict) -> float:
    return statistics.median(row["times_ms"])


def _peak(row: dict) -> float:
    return row["peak_bytes"]


def _kept(row: dict) -> float:
    return row["saved_bytes"]


COLUMNS: Columns = [
    ("network", "{network}"),
    ("method", "{method}"),
    ("step, ms", lambda row: f"{_ms(row):.1f}"),
    ("/ standard", lambda row: relative_text(row, STANDARD, _ms)),
    ("kept, MiB", lambda row: mib(row["saved_bytes"])),
    ("/ standard", lambda row: relative_text(row, STANDARD, _kept)),
    ("peak, MiB", lambda row: mib(row["peak_bytes"])),
    ("/ standard", lambda row: relative_text(row, STANDARD, _peak)),
    ("first step, s", "{first_step_s:.1f}"),
    ("loss", "{loss:.4f}"),
]


def sections(rows: Rows) -> Iterator[str]:
    yield section("Steps", prose("gpu/steps"), columns(beside(rows, "method", "network"), COLUMNS, left=2))


def pictures(rows: Rows) -> Mapping[str, Figure]:
    return bars(rows, "network", "method", {"step, ms": _ms, "peak, MiB": lambda row: _peak(row) / MIB})


PART = Part("Training steps of Table 3's networks", 7, items, measure, sections, pictures)
