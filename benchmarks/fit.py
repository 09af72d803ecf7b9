"""The largest training steps that really fit into a CUDA device, compared with the plan:

    python -m benchmarks.fit out=FILE.json
    python -m benchmarks.fit only=[cityscapes_resnext101] out=FILE.json
    python -m benchmarks.fit device=cpu tiny=true only=[cityscapes_resnext101] out=FILE.json

For each network and dataset of the paper's Table 3: the most crops of the first row's size with standard and with
in-place norms, and the largest crops with in-place norms; and RevNet's claims on 224x224 images. Three float32 steps
must fit. A 12GiB device is emulated by a limit on PyTorch's allocator, less CUDA's context. The third command rehearses
every line.
"""

import gc
import itertools
import os
import re
from dataclasses import dataclass

import torch

from benchmarks import frame
from benchmarks.memory_plan import BUDGET, COLUMNS
from benchmarks.rows import GIB, MIB, Rows
from benchmarks.steps import ENDLESS
from engine import assemble
from engine.assemble.tasks import TASKS
from engine.process.allocations import is_out_of_memory
from engine.process.distributed import World
from engine.training import build, loop, planner
from keepless.fit.sizes import largest
from keepless.units import bytes_of
from scripts.reports import papers

ROWS = {"std": "std", "inplace": "inplace_fixed_crop", "inplace/size": "inplace_fixed_batch"}  # of Table 3
# The claims of RevNet's section 7.2: experiment, overrides. A unit has six layers: 2 + 6 * 100 are 602.
CLAIMS = {
    "ResNet-101": ("revnet/imagenet_resnet101", "trainer.accumulation_steps=1"),
    "RevNet-104": ("revnet/imagenet_revnet104",),
    "RevNet-602": ("revnet/imagenet_revnet104", "body.structure=[2,2,94,2]"),
}
FEWEST = 2  # crops: the head's pooled branch needs two
SMALLEST, STRIDE = 256, 8  # pixels
TINY = ("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8", "data.crop_size=48")


@dataclass
class FitArguments(frame.DeviceArguments):
    device: str = "cuda"
    tiny: bool = False  # a tiny ResNeXt, and no limit on a CPU


def items(arguments: FitArguments) -> dict[str, tuple]:
    pairs = [*itertools.product(COLUMNS, ROWS), *((network, "std") for network in CLAIMS)]
    return {"/".join(item): item for item in pairs}


class Trained:
    """A training on random images; their number and size may change from step to step."""

    def __init__(self, arguments: FitArguments, network: str, kind: str):
        row, *words = CLAIMS.get(network) or (f"table3/{network}_{ROWS[kind]}",)
        if arguments.tiny:
            words += [*TINY, "norm.backend=eager"]
        trainer = (f"trainer.device={arguments.device}", "trainer.precision=float32", "trainer.accumulation_steps=1")
        self.config = papers.configured_as(row, *words, *trainer, "trainer.capture=false")
        self.row_crops = self.config.data.crops_per_minibatch // papers.devices_of(row)
        assemble.arithmetic(self.config.trainer)
        self.task = TASKS[self.config.task]
        self.world = World(device=torch.device(arguments.device))
        class_count = planner.classes_of(self.config.data)
        self.learner = build.learner(self.config, class_count, ENDLESS, self.world)
        self.loss = self.task.loss(self.config, self.learner.network)

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
        return torch.cuda.max_memory_reserved() if device.type == "cuda" else crops * size**2 * 6000  # about


def measure(arguments: FitArguments, network: str, kind: str) -> Rows:
    """The largest number or size of crops with which three steps run in `BUDGET`.

    {"network", "norm", "limit", "grows": crops or pixels, "the row's": of Table 3, on one of four devices, "most":
    that fit, "planned GiB": of the step found, "allocated GiB": its peak, "reserved GiB": of the allocator}
    """
    trained = Trained(arguments, network, kind)
    is_cuda = arguments.device == "cuda"
    allowed = _limited(trained) if is_cuda else 200 * MIB
    data = trained.config.data
    grows_pixels = kind == "inplace/size"
    row: dict = {"network": network, "norm": trained.config.norm.name, "limit": BUDGET}
    row["grows"] = "pixels" if grows_pixels else "crops"
    row["the row's"] = data.crop_size if grows_pixels else trained.row_crops

    def shape(value: int) -> tuple[int, int]:
        return (trained.row_crops, value) if grows_pixels else (value, data.crop_size)

    smallest, step, power = (48 if arguments.tiny else SMALLEST, STRIDE, 2) if grows_pixels else (FEWEST, 1, 1)
    most = largest(lambda value: trained.steps_peak(*shape(value), allowed), allowed, smallest, step, power)
    if most is None:
        return [{**row, "reason": f"not even {smallest} fit"}]
    row["most"] = most
    trained.steps_peak(*shape(most), allowed)  # the device's counters are of this step
    device_counters = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if is_cuda else (0, 0)
    planned = planner.step_memory(trained.config, *shape(most)).peak
    for name, size in zip(("planned", "allocated", "reserved"), (planned, *device_counters), strict=True):
        row[f"{name} GiB"] = round(size / GIB, 3)
    return [row]


def _limited(trained: Trained) -> int:
    """Limit this process to what a device of `BUDGET` would leave after CUDA's context; return the bytes left."""
    trained.steps_peak(FEWEST, trained.config.data.crop_size // 2, 0)  # loads the libraries
    free, total = torch.cuda.mem_get_info()
    context = (_own_bytes() or total - free) - torch.cuda.memory_reserved()
    allowed = min(bytes_of(BUDGET) or 0, total) - context
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return allowed


def _own_bytes() -> int | None:
    """Bytes of the device that this process has, if the driver lists processes; others may share the device."""
    processes = re.findall(r"process +(\d+) uses +([\d.]+) MB", torch.cuda.list_gpu_processes())
    return next((int(float(megabytes) * MIB) for pid, megabytes in processes if int(pid) == os.getpid()), None)


def heading(arguments: dict) -> tuple[str, str]:
    words = "`keepless.fit` should take off what is allocated beyond the plan, and what is reserved beyond that"
    return "What fits into a device", words


BENCHMARK = frame.Benchmark("fit", FitArguments, items, measure, heading)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
