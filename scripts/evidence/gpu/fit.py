"""Part "fit": the largest minibatch and crop that really fit into a device, beside the plan."""

import gc
from collections.abc import Iterator

import torch

import train_imagenet  # noqa: F401  # declares its command
from engine import assemble, loop, planner
from engine.configuration.command_line import composed
from engine.configuration.config import typed
from engine.distributed import World
from engine.memory import is_out_of_memory
from engine.tasks import TASKS
from keepless.fit.sizes import largest
from keepless.units import bytes_of
from scripts.evidence.frame import GIB, MIB, prose
from scripts.evidence.gpu.part import Part, Rows, Setting, beside, relative_text
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

    def steps_peak(self, crops: int, size: int, allowed: int) -> int:
        """Bytes that the allocator takes for three steps; more than `allowed` if they do not fit."""
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
            return 2 * allowed
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved()
        return crops * size**2 * 6000  # about what a small network takes: a rehearsal measures nothing


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
    rows = []

    def shape(value: int) -> tuple[int, int]:
        return (value, size) if what == "batch" else (crops, value)

    def peak(value: int) -> int:
        return trained.steps_peak(*shape(value), allowed)

    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        found = largest(peak, allowed, FEWEST[what], STEPS[what], power=1 if what == "batch" else 2)
        row: dict = {"network": network, "norm": norm, "limit": limit, "what": what, "benchmark": benchmark}
        if found is None:
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


FITS: Columns = [
    ("network", "{network}, {norm}"),
    ("device", "{limit}"),
    ("cuDNN's benchmark", lambda row: "on" if row["benchmark"] else "off"),
    ("largest", lambda row: f"{row['found']} crops" if row["what"] == "batch" else f"{row['found']} pixels"),
    ("/ standard", lambda row: relative_text(row, "std", _pixels)),
    ("planned, GiB", lambda row: f"{row['planned_bytes'] / GIB:.2f}"),
    ("allocated, GiB", lambda row: f"{row['allocated_bytes'] / GIB:.2f}"),
    ("reserved, GiB", lambda row: f"{row['reserved_bytes'] / GIB:.2f}"),
    ("workspace, GiB", lambda row: f"{(row['allocated_bytes'] - row['planned_bytes']) / GIB:.2f}"),
    ("unused", lambda row: f"{1 - row['allocated_bytes'] / max(row['reserved_bytes'], 1):.1%}"),
]


def _pixels(row: dict) -> float:
    """Of a minibatch, up to a factor."""
    return row["found"] ** (1 if row["what"] == "batch" else 2)


def sections(rows: Rows) -> Iterator[str]:
    found = beside(rows, "norm", "network", "limit", "what", "benchmark")
    yield section("What fits", prose("gpu/fit"), columns(found, FITS))
    if nothing := [row for row in rows if "reason" in row]:
        lines = (
            f"- {row['network']}, {row['norm']}, {row['limit']}, {row['what']}: {row['reason']}" for row in nothing
        )
        yield section("What does not", "\n".join(lines))


PART = Part("What fits into a device", 8, items, measure, sections)
