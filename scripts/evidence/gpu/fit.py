"""Part "fit": the largest minibatch and crop that really fit into a device, beside the plan."""

import gc
from collections.abc import Callable, Iterator

import torch

import train_imagenet  # noqa: F401  # declares its command
from engine import assemble, loop, planner
from engine.configuration.command_line import composed
from engine.configuration.config import typed
from engine.distributed import World
from engine.memory import is_out_of_memory
from engine.tasks import TASKS
from keepless.units import bytes_of
from scripts.evidence.frame import GIB, MIB
from scripts.evidence.gpu.part import Part, Rows, Setting
from scripts.evidence.gpu.steps import CROPS, overrides
from scripts.evidence.plan_experiments import CLAIMS
from scripts.evidence.training_steps import ENDLESS
from scripts.reports.markdown import Columns, columns, section

LIMITS = ("12GiB", "card")
NORMS = ("std", "inplace")
STEPS = {"batch": 1, "crop": 8}  # of the search
FEWEST = {"batch": 2, "crop": 64}  # the pooled branch of the head needs two crops
REVNETS = tuple(CLAIMS)  # of RevNet's section 7.2: images of 224x224


def items(setting: Setting) -> dict[str, tuple]:
    if setting.rehearse:
        found = [("resnext101", "std", "12GiB", "crop"), ("RevNet-104", "std", "12GiB", "batch")]
    else:
        found = [(body, norm, limit, what) for limit in LIMITS for body in CROPS for norm in NORMS for what in STEPS]
        found += [(network, "std", LIMITS[0], "batch") for network in REVNETS]
    return {"/".join(item): item for item in found}


class Trained:
    """A training of random images, whose size changes. `planned` are the bytes that the planner says."""

    def __init__(self, setting: Setting, network: str, norm: str):
        entry, words = _command(setting, network)
        self.task = next(task for task in TASKS.values() if task.entry == entry)
        self.config = typed(composed(entry, *words, f"norm={norm}"), self.task.schema)
        assemble.arithmetic(self.config.trainer)
        self.world = World(device=torch.device(setting.device))
        classes = planner.classes_of(self.config.data)
        self.learner = assemble.learner(
            self.config, lambda group: assemble.network_of(self.config, classes, group), ENDLESS, self.world
        )
        self.loss = self.task.loss(self.config)

    def planned(self, crops: int, size: int) -> int:
        return planner.step_memory(self.config, crops, size).peak

    def steps_peak(self, crops: int, size: int, allowed: int) -> int | None:
        """Bytes that the allocator takes for three steps; None if they do not fit into `allowed`."""
        device = self.world.device
        self.learner.network.zero_grad()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        images = torch.randint(256, (crops, 3, size, size), dtype=torch.uint8, device=device)
        minibatch = {"image": images, "label": self.task.labels(crops, (size, size)).to(device)}
        try:
            for _ in range(3):
                loop.train_step(self.learner, self.loss, minibatch, crops, self.world)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved()
        taken = crops * size**2 * 6000  # about what a small network takes: a rehearsal measures nothing
        return taken if taken <= allowed else None


def _command(setting: Setting, network: str) -> tuple[str, tuple[str, ...]]:
    """The entry that trains a network, and its overrides."""
    if network not in REVNETS:
        return "train_seg", overrides(setting, network, CROPS[network])
    trainer = (f"trainer.device={setting.device}", "trainer.precision=float32", "trainer.accumulation_steps=1")
    if setting.rehearse:
        return "train_imagenet", ("body=revnet_tiny", "norm.backend=eager", *trainer)
    experiment, *more = CLAIMS[network]
    return "train_imagenet", (f"experiment={experiment}", *more, *trainer)


def measure(setting: Setting, network: str, norm: str, limit: str, what: str) -> Rows:
    """The largest batch, or crop in a device's share, with which three steps run in `limit`.

    A row without and one with cuDNN's benchmark: {"network", "norm", "limit", "what", "benchmark", "found",
    "allowed_bytes", "planned_bytes": of the step found, "allocated_bytes": its peak, "reserved_bytes": of the
    allocator}.
    """
    trained = Trained(setting, network, norm)
    size = trained.config.data.crop_size
    crops = 2 if setting.rehearse else CROPS.get(network, 8)
    allowed = _limited(setting, limit, trained, crops, size)
    first, power = (crops, 1) if what == "batch" else (size, 2)
    rows = []

    def shape(value: int) -> tuple[int, int]:
        return (value, size) if what == "batch" else (crops, value)

    def peak(value: int) -> int | None:
        return trained.steps_peak(*shape(value), allowed)

    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        found = largest(peak, allowed, max(first, FEWEST[what] + STEPS[what]), FEWEST[what], STEPS[what], power)
        row: dict = {"network": network, "norm": norm, "limit": limit, "what": what, "benchmark": benchmark}
        if not found:
            rows.append({**row, "reason": f"not even {FEWEST[what]} fit"})
            continue
        peak(found)  # the device's counters are of this step
        cuda = setting.device == "cuda"
        row |= {"found": found, "allowed_bytes": allowed, "planned_bytes": trained.planned(*shape(found))}
        row["allocated_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
        rows.append({**row, "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0})
    torch.backends.cudnn.benchmark = False
    return rows


def _limited(setting: Setting, limit: str, trained: Trained, crops: int, size: int) -> int:
    """Limit this process to what a device of `limit` would leave beside CUDA's context; return the bytes left.

    On a CPU nothing limits it: the rehearsal's steps may take 200 MiB.
    """
    if setting.rehearse:
        return 200 * MIB
    trained.steps_peak(crops, size, 0)  # loads the libraries
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    device = total if limit == "card" else bytes_of(limit)
    assert device is not None
    allowed = min(device, total) - context
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return allowed


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
    ("/ standard", "{ratio}"),
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


def sections(rows: Rows) -> Iterator[str]:
    about = (
        "The largest minibatch of 512x512 crops, and the largest crop in a device's share of Table 3's first row, with "
        "which three float32 steps run; of RevNet's claims, the most images of 224x224. A device of 12 GiB is a limit "
        "of PyTorch's allocator, less CUDA's context. *To standard* counts pixels. *Workspace* is what was allocated "
        "beyond the plan, *unused* the allocator's fragmentation: what `memory.workspace` and `memory.fragmentation` "
        "should be."
    )
    known = [row for row in rows if "reason" not in row]
    yield section("What fits", about, columns(_with_ratio(known), FITS))
    if nothing := [row for row in rows if "reason" in row]:
        lines = (
            f"- {row['network']}, {row['norm']}, {row['limit']}, {row['what']}: {row['reason']}" for row in nothing
        )
        yield section("What does not", "\n".join(lines))


PART = Part("What fits into a device", 8, items, measure, sections, lambda rows: {})
