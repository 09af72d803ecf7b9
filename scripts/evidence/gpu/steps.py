"""Parts "steps" and "fit": whole training steps of Table 3's networks, and how many crops really fit."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import nn

from engine import loop, planner
from engine.memory import is_out_of_memory
from keepless import recompute_activations
from keepless.units import bytes_of
from scripts.evidence.frame import GIB, MIB, mib
from scripts.evidence.gpu.part import Part, Rows, Setting, bars
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


def _to_standard(rows: Rows, value: Callable[[dict], float]) -> Callable[[dict], float | None]:
    standard = {row["network"]: value(row) for row in rows if row["method"] == STANDARD}
    return lambda row: value(row) / standard[row["network"]] if row["network"] in standard else None


def _ms(row: dict) -> float:
    return statistics.median(row["times_ms"])


def _peak(row: dict) -> float:
    return row["peak_bytes"]


def sections(rows: Rows) -> Iterator[str]:
    time, peak, saved = (_to_standard(rows, value) for value in (_ms, _peak, lambda row: row["saved_bytes"]))
    shown: Columns = [
        ("network", "{network}"),
        ("method", "{method}"),
        ("step, ms", lambda row: f"{_ms(row):.1f}"),
        ("to standard", lambda row: _text(time(row))),
        ("kept, MiB", lambda row: mib(row["saved_bytes"])),
        ("to standard", lambda row: _text(saved(row))),
        ("peak, MiB", lambda row: mib(row["peak_bytes"])),
        ("to standard", lambda row: _text(peak(row))),
        ("first step, s", "{first_step_s:.1f}"),
        ("loss", "{loss:.4f}"),
    ]
    about = (
        "Whole steps of `train_seg.py` with a device's share of Table 3's first rows: 4 (ResNeXt-101) or 5 "
        "(WideResNet-38) crops of 512x512, forward, loss, backward and SGD. *Kept* is for the backward pass. Peaks are "
        "of a step after the third, beyond what was allocated before."
    )
    yield section("Steps", about, columns(rows, shown, left=2))


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def pictures(rows: Rows) -> Mapping[str, Figure]:
    return bars(rows, "network", "method", {"step, ms": _ms, "peak, MiB": lambda row: _peak(row) / MIB})


LIMITS = ("12GiB", "card")
FEWEST = {"batch": 2, "crop": 64}  # the pooled branch of the head needs two crops
STEPS = {"batch": 1, "crop": 8}
NORMS = ("std", "inplace")


def fit_items(setting: Setting) -> dict[str, tuple]:
    bodies = ("resnext101",) if setting.rehearse else RECIPES
    limits, norms = (LIMITS[:1], NORMS[:1]) if setting.rehearse else (LIMITS, NORMS)
    found = [(body, norm, limit, what) for limit in limits for body in bodies for norm in norms for what in STEPS]
    return {"/".join(item): item for item in found}


def measure_fit(setting: Setting, body: str, norm: str, limit: str, what: str) -> Rows:
    """The largest batch of 512x512 crops, or crop in a device's share, with which three steps run in `limit`.

    A row without and one with cuDNN's benchmark: {"network", "norm", "limit", "what", "benchmark", "found",
    "planned_bytes": of the step found, "allocated_bytes": its peak, "reserved_bytes": of the allocator, "most_planned":
    what the planner takes for the largest}.
    """
    crops, size = (2, 48) if setting.rehearse else (CROPS[body], 512)
    training = Training(overrides(setting, body, crops, f"norm={norm}"), PLAIN, torch.get_num_threads())
    allowed = _limited(setting, limit, training)
    step, rows = STEPS[what], []

    def shape(value: int) -> tuple[int, int]:
        return (value, size) if what == "batch" else (crops, value)

    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark

        def peak(value: int) -> int | None:
            return steps_peak(training, *shape(value), allowed)

        first, power = (crops, 1) if what == "batch" else (size, 2)
        found = largest(peak, allowed, max(first, FEWEST[what] + step), FEWEST[what], step, power)
        peak(found)  # its counters are read below
        cuda = setting.device == "cuda"
        rows.append(
            {
                **{"network": body, "norm": norm, "limit": limit, "what": what, "benchmark": benchmark, "found": found},
                "allowed_bytes": allowed,
                "planned_bytes": planner.step_memory(training.config, *shape(found)).peak,
                "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
                "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
            }
        )
    torch.backends.cudnn.benchmark = False
    return rows


def _limited(setting: Setting, limit: str, training: Training) -> int:
    """Limit this process to what a device of `limit` would leave beside CUDA's context; return the bytes left.

    On a CPU nothing limits it: the rehearsal's steps may take 200 MiB, or 300 as the card.
    """
    if setting.rehearse:
        return (300 if limit == "card" else 200) * MIB
    training.step()  # so that the libraries have loaded
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    device = total if limit == "card" else bytes_of(limit)
    assert device is not None
    allowed = min(device, total) - context
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return allowed


def steps_peak(training: Training, crops: int, size: int, allowed: int) -> int | None:
    """Bytes that the allocator takes for three steps on random crops; None if they do not fit into `allowed`."""
    device = training.world.device
    network = training.learner.network
    network.zero_grad()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    minibatch = {
        "image": torch.randint(256, (crops, 3, size, size), dtype=torch.uint8, device=device),
        "label": torch.randint(19, (crops, size, size), dtype=torch.uint8, device=device),
    }
    try:
        for _ in range(3):
            loop.train_step(training.learner, training.loss, minibatch, crops, training.world)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved()
    taken = crops * size**2 * 6000  # about what a small network takes: the rehearsal measures nothing
    return taken if taken <= allowed else None


def largest(peak: Callable[[int], int | None], allowed: int, first: int, fewest: int, step: int, power: int) -> int:
    """The largest value whose steps fit, in steps from `fewest`; 0 if not even that does.

    `power`: bytes grow with value ** power; the search starts where a line through two measured points meets `allowed`.
    """
    low, high = peak(fewest), peak(first)
    value = fewest
    if low is not None and high is not None:
        slope = max(1.0, (high - low) / (first**power - fewest**power))
        value = int((first**power + 0.95 * (allowed - high) / slope) ** (1 / power)) // step * step
    while value >= fewest and peak(value) is None:
        value -= max(step, value // 20 // step * step)
    while value >= fewest and peak(value + step) is not None:
        value += step
    return value if value >= fewest else 0


FITS: Columns = [
    ("network", "{network}, {norm}"),
    ("device", "{limit}"),
    ("cuDNN's benchmark", lambda row: "on" if row["benchmark"] else "off"),
    ("largest", lambda row: f"{row['found']} crops" if row["what"] == "batch" else f"{row['found']} pixels"),
    ("to standard", "{ratio}"),
    ("planned, GiB", lambda row: f"{row['planned_bytes'] / GIB:.2f}"),
    ("allocated, GiB", lambda row: f"{row['allocated_bytes'] / GIB:.2f}"),
    ("reserved, GiB", lambda row: f"{row['reserved_bytes'] / GIB:.2f}"),
    ("workspace, GiB", lambda row: f"{(row['allocated_bytes'] - row['planned_bytes']) / GIB:.2f}"),
    ("unused", lambda row: f"{1 - row['allocated_bytes'] / max(row['reserved_bytes'], 1):.1%}"),
]


def _with_ratio(rows: Rows) -> Rows:
    """Pixels of the minibatch, relative to standard norms."""

    def case(row: dict) -> tuple:
        return tuple(row[name] for name in ("network", "limit", "what", "benchmark"))

    standard = {case(row): row["found"] for row in rows if row["norm"] == "std"}
    found = []
    for row in rows:
        ratio = row["found"] / standard[case(row)] if standard.get(case(row)) else float("nan")
        found.append({**row, "ratio": f"{ratio ** (1 if row['what'] == 'batch' else 2):.2f}"})
    return found


def fit_sections(rows: Rows) -> Iterator[str]:
    about = (
        "The largest minibatch of 512x512 crops, and the largest crop in a device's share of Table 3's first row, with "
        "which three float32 steps run; a device of 12 GiB is a limit of PyTorch's allocator, less CUDA's context. "
        "*To standard* counts pixels. *Workspace* is what was allocated beyond the plan, *unused* the allocator's own "
        "fragmentation: what `memory.workspace` and `memory.fragmentation` should be."
    )
    yield section("What fits", about, columns(_with_ratio(rows), FITS))


STEPS_PART = Part("Training steps of Table 3's networks", 7, items, measure, sections, pictures)
FIT_PART = Part("What fits into a device", 8, fit_items, measure_fit, fit_sections, lambda rows: {})
