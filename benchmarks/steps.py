"""Measure speed and memory of training steps under every switch:

    python -m benchmarks.steps [device=cpu|cuda] out=FILE.json
    python -m benchmarks.steps rounds=3 starts=1 out=FILE.json
    python -m benchmarks.steps parts=[recompute] device=cuda out=FILE.json

`parts` chooses groups of switches.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from benchmarks import frame
from benchmarks.measuring import interleaved, process, reason
from benchmarks.rows import Columns, Rows, columns, mib, ratio_of, section, without_reasons
from datasets import synthetic
from engine import assemble
from engine.process.allocations import forget_peak, keep_freed_memory, peak_memory_mib
from engine.process.distributed import World, device_of
from engine.process.transfers import prefetched
from engine.schema.keys import key
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun
from engine.training import build, loop
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from scripts.reports import papers

# What a training is measured with: overrides of train_seg.py, or one of these two.
DEFAULT, GIVEN_BACK = "default", "freed memory given back"  # see engine.process.allocations.keep_freed_memory
LONG = 100_000  # steps, more than a benchmark takes
COMPILE, STANDARD, BFLOAT16 = "trainer.compile=true", "norm=std", "trainer.precision=bfloat16"
CAPTURE, FULL_FLOAT32 = "trainer.capture=true", "trainer.tf32=false"
EAGER = "trainer.capture=false"  # without a switch, so that records compare
RECOMPUTE = [f"trainer.recompute={choice}" for choice in ("activations", "blocks", "sqrt")]
GROUPS: dict[str, tuple[str, ...]] = {
    "switches": (
        DEFAULT,
        BFLOAT16,
        "trainer.precision=float16",
        "trainer.channels_last=false",
        "optim.fused=false",
        "trainer.ema_decay=0.999",
        "optim.max_gradient_norm=1",
        "trainer.accumulation_steps=2",
        "trainer.accumulation_steps=4",
        "trainer.deterministic=true",
    ),
    "norms": (DEFAULT, STANDARD, BFLOAT16, f"{STANDARD} {BFLOAT16}"),
    "allocation": (DEFAULT, GIVEN_BACK),
    "recompute": (DEFAULT, STANDARD, f"{STANDARD} {RECOMPUTE[0]}", *RECOMPUTE),
    "compile": (
        *(DEFAULT, COMPILE, f"{COMPILE} trainer.accumulation_steps=3"),
        *(BFLOAT16, f"{BFLOAT16} {COMPILE}", STANDARD, f"{STANDARD} {COMPILE}"),
    ),
    "card": (  # what a CUDA device is for: matrix units, and a host that does not hold it back
        *(DEFAULT, CAPTURE, BFLOAT16, f"{BFLOAT16} {CAPTURE}", f"{STANDARD} {FULL_FLOAT32}", STANDARD),
        *(f"{STANDARD} {BFLOAT16}", f"{STANDARD} {BFLOAT16} {CAPTURE}"),
        *(f"{BFLOAT16} {RECOMPUTE[1]}", f"{BFLOAT16} {RECOMPUTE[1]} {CAPTURE}", f"{STANDARD} {BFLOAT16} {COMPILE}"),
        f"{BFLOAT16} trainer.channels_last=false",
    ),
    "capture": (DEFAULT, "trainer.capture=auto", CAPTURE),
}


MINIBATCHES = 4  # different ones, repeated
ENDLESS = Schedule(LONG, steps_per_epoch=LONG, evaluate_every=None, checkpoint_every=LONG, log_every=LONG)


class Training:
    """One training, step by step.

    Args:
        common: overrides of train_seg.py that hold for every switch.
        switch: what is different here, of `GROUPS`.
    """

    def __init__(self, common: tuple[str, ...], switch: str):
        words = (word for word in switch.split() if "=" in word)  # DEFAULT and GIVEN_BACK are names
        self.config = papers.configured_as(None, *common, *words)
        assert isinstance(self.config, SegmentationRun)
        trainer = self.config.trainer
        assemble.arithmetic(trainer, fixed_sizes=True)  # as in a training
        self.world = World(device=device_of(trainer.device))
        if self.world.device.type == "cpu" and switch != GIVEN_BACK:
            keep_freed_memory()
        dataset = synthetic(None, "train")
        self.learner = build.learner(self.config, len(dataset.classes), ENDLESS, self.world)
        self.loss = assemble.loss(self.config.loss, network=self.learner.network)
        in_memory = list(assemble.training_loader(self.config, dataset, MINIBATCHES, self.world))
        self.minibatches = iter(prefetched(itertools.cycle(in_memory), self.world.device))  # as the training loop's
        self.losses: list[float] = []

    def step(self) -> float:
        """Milliseconds of one more step."""
        started_s = time.perf_counter()
        minibatch = next(self.minibatches)
        crops = self.config.data.crops_per_minibatch
        loss, *_ = self.learner.read(loop.train_step(self.learner, self.loss, minibatch, crops, self.world))
        self.losses.append(loss)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return round(1e3 * (time.perf_counter() - started_s), 3)

    def warm_up(self, steps: int) -> None:
        """The first step compiles; in the end micro-batches are captured, if the switch says so."""
        self.first_step_s = round(self.step() / 1e3, 2)
        for _ in range(steps - 1):
            self.step()
        forget_peak(self.world.device)  # of cuDNN's search for algorithms
        if self.learner.captured is not None:
            self.learner.captured.begin()
            self.step()

    def facts(self) -> dict:
        """Seconds of the first step, memory, and the mean loss of all minibatches after the first step."""
        process_mib = round(peak_memory_mib(torch.device("cpu")), 1)
        is_captured = self.learner.captured is not None
        reserved = {}
        if self.world.device.type == "cuda":
            reserved["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if not is_captured:
            self.learner.network.zero_grad()  # so that the step's own gradients are in its peak
        return {
            "first_step_s": self.first_step_s,
            "saved_bytes": None if is_captured else self.saved_bytes(),
            "peak_bytes": None if is_captured else peak_bytes(self.step, self.world.device),  # a graph has its own pool
            **reserved,
            "process_mib": process_mib,
            "loss": round(statistics.mean(self.losses[1 : 1 + MINIBATCHES]), 5),
        }

    def saved_bytes(self) -> int:
        """Bytes that autograd saves of the first micro-batch for its backward pass, without parameters."""
        minibatch = next(self.minibatches)
        parts = self.config.trainer.accumulation_steps
        images, labels = (minibatch[key].tensor_split(parts)[0] for key in ("image", "label"))
        self.learner.network.train()
        labels = labels.to(self.world.device)
        return kept_bytes(self.learner.network, lambda: self.loss(self.learner.forward(images), labels))


training_of = cache(Training)  # a process has one


def call(common: tuple[str, ...], switch: str, method: str, *arguments: object) -> Any:
    """Call a method of the training of this process."""
    return getattr(training_of(common, switch), method)(*arguments)


@dataclass
class TrainingArguments(frame.TimedArguments):
    recipe: str | None = "camvid/resnext_small"  # experiment whose network is trained; null: the default network
    threads: int = key(2, above=0)  # of PyTorch
    crop_size: int = key(240, above=0)  # pixels
    crops: int = key(8, above=0)  # per step
    starts: int = key(2, above=0)  # of all processes; their memory is laid out differently each time
    rounds: int = key(10, above=0)  # of each start
    warm_up: int = key(3, above=0)  # steps
    parts: list[str] = key(["switches", "allocation"], one_of=tuple(GROUPS))  # what is measured
    overrides: list[str] = field(default_factory=list)  # further ones of train_seg.py, for everything

    def words(self) -> tuple[str, ...]:
        """The overrides of train_seg.py shared by everything measured: float32, synthetic street scenes."""
        experiment = () if self.recipe is None else (f"experiment={self.recipe}",)
        # With CamVid's crops, as wide as its pictures.
        data = ("data=synthetic", f"data.base_size={2 * self.crop_size}", f"data.crop_size={self.crop_size}")
        training = ("data.workers=0", f"data.crops_per_minibatch={self.crops}", f"trainer.device={self.device}")
        return (*experiment, *data, *training, "trainer.precision=float32", EAGER, *self.overrides)


def items(arguments: TrainingArguments) -> dict[str, tuple]:
    """Each start of all switches. On CUDA by norm, for its memory, and compiled ones apart."""
    starts: dict[str, tuple] = {}
    switches = dict.fromkeys(switch for part in arguments.parts for switch in GROUPS[part])
    for start in range(1, 1 + arguments.starts):
        for switch in switches:
            share = "standard" if STANDARD in switch else "in-place"
            share = "compiled" if COMPILE in switch else share
            item = f"start{start}/{share}" if arguments.device == "cuda" else f"start{start}"
            starts[item] = (start, (*starts.get(item, (start, ()))[1], switch))
    return starts


def measure(arguments: TrainingArguments, start: int, switches: tuple[str, ...]) -> Rows:
    """Time steps in rounds, with a process for each switch. A row for each, with the reason if it cannot run here.

    Raises if the default fails, because the others are compared with it.
    """
    synthetic(None, "train")  # written once, before the processes ask for it
    common = arguments.words()
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        running = {name: stack.enter_context(process(arguments.threads)) for name in switches}

        def ask(name: str, method: str, *arguments: object) -> Any:
            if name not in failed:
                try:
                    return running[name].submit(call, common, name, method, *arguments).result()
                except Exception as error:  # e.g. of a compiler: the others can still be measured
                    if name == DEFAULT:
                        raise
                    failed[name] = reason(error)
            return 0.0

        for name in switches:
            ask(name, "warm_up", arguments.warm_up)
        times_ms = interleaved({name: partial(ask, name, "step") for name in switches}, arguments.rounds)
        facts = {name: ask(name, "facts") for name in switches}

    rows: Rows = []
    for name in switches:
        outcome = {"reason": failed[name]} if name in failed else {**facts[name], "times_ms": times_ms[name]}
        rows.append({"switch": name, "start": start, **outcome})
    return rows


def heading(arguments: dict) -> tuple[str, str]:
    crops = f"minibatches of {arguments['crops']} crops of {arguments['crop_size']} pixels in float32"
    starts, rounds = (
        f"{arguments[noun]} {noun}"[: None if arguments[noun] != 1 else -1] for noun in ("starts", "rounds")
    )
    network = arguments["recipe"] or "the default network"
    title = ", ".join(arguments["parts"]) + ("" if arguments["device"] == "cpu" else f" of {network}, on CUDA")
    return title[0].upper() + title[1:], f"{network}, {crops}, {starts} of {rounds}"


Starts = list[dict]  # the rows of a switch, one per start


def sections(call: dict, _: str) -> Iterator[str]:
    rows_by_switch = defaultdict[str, Starts](list)
    for row in without_reasons(frame.rows_of(call)):
        rows_by_switch[row["switch"]].append(row)
    if rows_by_switch:
        default = rows_by_switch.get(DEFAULT)
        rows = [{"name": name, "own": starts, "default": default} for name, starts in rows_by_switch.items()]
        yield section("Switches", columns(rows, SWITCHES))


def spread(row: dict) -> str:
    """Median ratio to the default's time; if there are several starts, each one's ratio in brackets."""
    starts_of_switch = row["own"]
    default_starts = row["default"]
    if default_starts is None or starts_of_switch is default_starts:
        return "" if default_starts is None else "1"
    starts = []  # each with the pairs of its rounds: slow steps may have skipped the last
    for start, default_start in zip(starts_of_switch, default_starts, strict=True):
        starts.append([*zip(start["times_ms"], default_start["times_ms"], strict=False)])
    total, *ratios = (f"{ratio_of(*zip(*pairs, strict=True)).median:.2f}" for pairs in (sum(starts, []), *starts))
    return total + (f" ({', '.join(ratios)})" if len(ratios) > 1 else "")


SWITCHES: Columns = [
    ("switch", lambda row: f"`{row['name']}`" if "=" in row["name"] else row["name"]),
    ("step, ms", lambda row: f"{statistics.median(sum((start['times_ms'] for start in row['own']), [])):.0f}"),
    ("time / default", spread),
    ("saved, MiB", lambda row: mib(row["own"][0]["saved_bytes"])),
    ("peak, MiB", lambda row: mib(row["own"][0]["peak_bytes"])),
    ("process, MiB", lambda row: f"{row['own'][0]['process_mib']:.0f}"),
    ("first step, s", lambda row: " and ".join(f"{start['first_step_s']:.0f}" for start in row["own"])),
    ("loss", lambda row: f"{row['own'][0]['loss']:.4f}"),
]


BENCHMARK = frame.Benchmark("steps", TrainingArguments, items, measure, heading, sections)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
