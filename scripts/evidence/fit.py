"""The largest minibatch that really fits into a CUDA device, compared with the plan:

    python -m scripts.evidence.fit out=FILE.json
    python -m scripts.evidence.fit only=[resnext101/std/12GiB] out=FILE.json
    python -m scripts.evidence.fit limits=[24GiB] out=FILE.json

Networks of Table 3 on 512x512 crops, three float32 steps, and RevNet's claims on 224x224 images. A 12GiB device
is emulated by a limit on PyTorch's allocator, less CUDA's context.
"""

import gc
import itertools
from dataclasses import dataclass, field
from functools import partial

import torch

from engine import assemble
from engine.assemble.tasks import TASKS
from engine.process.distributed import World
from engine.process.memory import is_out_of_memory
from engine.training import loop, planner, setup
from keepless.fit.sizes import largest
from keepless.units import bytes_of
from scripts.evidence.training import ENDLESS
from scripts.plan_memory import CLAIMS
from scripts.reports import frame, papers
from scripts.reports.markdown import GIB, MIB, Rows

BODIES = {"resnext101": 4, "wrn38": 5}  # of Table 3: crops on each of four devices, as in the first rows
FEWEST = 2  # crops: the pooled branch of the head needs two
TINY = {  # smaller networks of the same kind
    "resnext101": ("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8"),
    "RevNet-104": ("body=revnet_tiny",),
}


@dataclass
class FitArguments(frame.DeviceArguments):
    device: str = "cuda"
    limits: list[str] = field(default_factory=lambda: ["12GiB", "card"])
    tiny: bool = False  # tiny networks of `TINY`, and no limit: a rehearsal of every line, also on a CPU


def items(arguments: FitArguments) -> dict[str, tuple]:
    found: list[tuple] = [
        (*case[1:], case[0]) for case in itertools.product(arguments.limits, BODIES, ("std", "inplace"))
    ]
    found += [(network, "std", arguments.limits[0]) for network in CLAIMS]
    return {"/".join(item): item for item in found}


class Trained:
    """A training on random images; their number may change from step to step."""

    def __init__(self, arguments: FitArguments, network: str, norm: str):
        table3 = (f"table3/cityscapes_{network}_std", "data=synthetic", "data.base_size=512", "data.crop_size=512")
        experiment, *words = CLAIMS.get(network) or (*table3, f"data.crops_per_minibatch={BODIES[network]}")
        words += ["data.crop_size=48", "norm.backend=eager", *TINY[network]] if arguments.tiny else []
        trainer = (f"trainer.device={arguments.device}", "trainer.precision=float32", "trainer.accumulation_steps=1")
        self.config = papers.configured_as(experiment, f"norm={norm}", *words, *trainer)
        assemble.arithmetic(self.config.trainer)
        self.task, self.world = TASKS[self.config.task], World(device=torch.device(arguments.device))
        make = partial(assemble.network_of, self.config, planner.classes_of(self.config.data))
        self.learner = setup.learner(self.config, make, ENDLESS, self.world)
        self.loss = self.task.loss(self.config)

    def steps_peak(self, crops: int, allowed: int) -> int:
        """Bytes that the allocator takes for three steps; more than `allowed` if they do not fit."""
        device, size = self.world.device, self.config.data.crop_size
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


def measure(arguments: FitArguments, network: str, norm: str, limit: str) -> Rows:
    """The largest batch with which three steps run in `limit`.

    {"network", "norm", "limit", "most crops", "planned GiB": of the step found, "allocated GiB": its peak,
    "reserved GiB": of the allocator}
    """
    trained, cuda = Trained(arguments, network, norm), arguments.device == "cuda"
    allowed = _limited(limit, trained) if cuda else 200 * MIB
    row: dict = {"network": network, "norm": norm, "limit": limit}
    found = largest(lambda crops: trained.steps_peak(crops, allowed), allowed, FEWEST, 1, power=1)
    if found is None:
        return [{**row, "reason": f"not even {FEWEST} fit"}]
    trained.steps_peak(found, allowed)  # the device's counters are of this step
    counted = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    planned = planner.step_memory(trained.config, found, trained.config.data.crop_size).peak
    sizes = zip(("planned", "allocated", "reserved"), (planned, *counted), strict=True)
    return [{**row, "most crops": found, **{f"{name} GiB": round(size / GIB, 3) for name, size in sizes}}]


def _limited(limit: str, trained: Trained) -> int:
    """Limit this process to what a device of `limit` would leave after CUDA's context; return the bytes left."""
    trained.steps_peak(FEWEST, 0)  # loads the libraries
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    allowed = min(total if limit == "card" else bytes_of(limit) or 0, total) - context
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return allowed


def about(arguments: dict) -> tuple[str, str]:
    words = "`keepless.fit` should take off what is allocated beyond the plan, and what is reserved beyond that"
    return "What fits into a device", words


BENCHMARK = frame.Benchmark("fit", FitArguments, items, measure, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
