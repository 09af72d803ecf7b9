"""Measure speed and memory of training steps under every switch:

    python -m scripts.evidence.training [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.training rounds=3 starts=1 out=FILE.json
    python -m scripts.evidence.training parts=[memory] device=cuda out=FILE.json

`parts` chooses groups of switches; "memory" has every way to take less.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasets import synthetic
from engine.schema.keys import key
from scripts.evidence.steps import DEFAULT, GROUPS, Switch, Training
from scripts.reports import frame
from scripts.reports.markdown import Columns, Rows, columns, mib, ratio_of, section, without_reasons
from scripts.reports.measuring import Elsewhere, interleaved

SLOW_MS = 5000  # a training with slower steps takes part in the first two rounds only
SUITED: dict[str, dict] = {  # arguments that are null, by device. Of Table 3, a device's share
    "cpu": dict(crop_size=240, crops=8, parts=["switches", "allocation"]),
    "cuda": dict(crop_size=512, crops=4, parts=["memory"]),
}
RECIPES = {"cpu": "camvid/resnext_small", "cuda": "table3/cityscapes_resnext101_inplace_fixed_batch"}


@dataclass
class TrainingArguments(frame.DeviceArguments):
    """Null takes what suits the device."""

    recipe: str | None = "auto"  # experiment whose network is trained; auto: see RECIPES; null: the default network
    threads: int = key(2, above=0)  # of PyTorch
    crop_size: int | None = key(None, above=0)  # pixels
    crops: int | None = key(None, above=0)  # per step
    starts: int = key(2, above=0)  # of all processes; their memory is laid out differently each time
    rounds: int = key(10, above=0)  # of each start
    warm_up: int = key(3, above=0)  # steps
    compiler: str = "inductor"  # of steps with a compiler's budget
    parts: list[str] | None = None  # what is measured
    overrides: list[str] = field(default_factory=list)  # further ones of train_seg.py, for everything

    def suited(self) -> "TrainingArguments":
        recipe = RECIPES[self.device] if self.recipe == "auto" else self.recipe
        return frame.filled(replace(self, recipe=recipe), SUITED[self.device])

    def check(self) -> None:
        super().check()
        frame.check_choices("parts", self.suited().parts or (), GROUPS)

    def words(self) -> tuple[str, ...]:
        """The overrides of train_seg.py shared by everything measured: float32, drawn street scenes."""
        assert self.crop_size is not None
        experiment = () if self.recipe is None else (f"experiment={self.recipe}",)
        # With CamVid's crops, as wide as its pictures.
        data = ("data=synthetic", f"data.base_size={2 * self.crop_size}", f"data.crop_size={self.crop_size}")
        own = ("data.workers=0", f"data.crops_per_minibatch={self.crops}", f"trainer.device={self.device}")
        return (*experiment, *data, *own, "trainer.precision=float32", *self.overrides)


def items(arguments: TrainingArguments) -> dict[str, tuple]:
    """Each start of all switches; on CUDA one switch after the other needs the device."""
    assert arguments.parts is not None
    found: dict[str, tuple] = {}
    switches = {switch.name: switch for part in arguments.parts for switch in GROUPS[part]}
    for start in range(1, 1 + arguments.starts):
        alone = {f"start{start}/{name}": (start, (switch,)) for name, switch in switches.items()}
        found |= alone if arguments.device == "cuda" else {f"start{start}": (start, tuple(switches.values()))}
    return found


def measure(arguments: TrainingArguments, start: int, switches: tuple[Switch, ...]) -> Rows:
    """A row of each switch, with the reason if it cannot run here. Raises if the default fails."""
    synthetic(None, "train")  # written once, before the processes ask for it
    lacking = "needs a CUDA device"
    running = {each.name: each for each in switches if not each.only_cuda or arguments.device == "cuda"}
    rows, failed = together(arguments, running)
    if DEFAULT in failed:  # nothing to compare with
        raise failed[DEFAULT]
    left_out = {each.name: lacking for each in switches} | {name: frame.reason(error) for name, error in failed.items()}
    own = {each.name: rows.get(each.name) or {"reason": left_out[each.name]} for each in switches}
    return [{"switch": name, "start": start, **row} for name, row in own.items()]


def together(
    arguments: TrainingArguments, chosen: Mapping[str, Switch]
) -> tuple[dict[str, dict], dict[str, Exception]]:
    """Start a process for each switch and time their steps in rounds; rows by switch, and errors by switch."""
    failed: dict[str, Exception] = {}
    common = arguments.words()
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(Elsewhere(Training, common, switch, arguments.threads, arguments.compiler))
            for name, switch in chosen.items()
        }
        last_ms = dict.fromkeys(chosen, 0.0)

        def ask(name: str, method: str, *given: object) -> Any:
            try:
                return None if name in failed else running[name].call(method, *given)
            except Exception as error:  # e.g. of a compiler: the others can still be measured
                failed[name] = error

        def step(name: str, number: int) -> float | None:
            if number >= 2 and last_ms[name] > SLOW_MS:
                return None
            ms = ask(name, "step")
            last_ms[name] = ms or 0.0
            return ms

        rows = {name: ask(name, "warm_up", arguments.warm_up) for name in chosen}
        times_ms = interleaved({name: partial(step, name) for name in chosen}, arguments.rounds)
        facts = {name: ask(name, "facts") for name in chosen}
    kept = [name for name in chosen if name not in failed]
    return {name: {**rows[name], **facts[name], "times_ms": times_ms[name]} for name in kept}, failed


def about(arguments: dict) -> tuple[str, str]:
    crops = f"minibatches of {arguments['crops']} crops of {arguments['crop_size']} pixels in float32"
    starts, rounds = (
        f"{arguments[noun]} {noun}"[: None if arguments[noun] != 1 else -1] for noun in ("starts", "rounds")
    )
    network = arguments["recipe"] or "the default network"
    title = ", ".join(arguments["parts"]) + ("" if arguments["device"] == "cpu" else f" of {network}, on CUDA")
    return title[0].upper() + title[1:], f"{network}, {crops}, {starts} of {rounds}"


Starts = list[dict]  # the rows of a switch, one per start


def switches_of(call: dict) -> dict[str, Starts]:
    found: dict[str, Starts] = {}
    for row in without_reasons(frame.rows_of(call)):
        found.setdefault(row["switch"], []).append(row)
    return found


def default_of(found: dict[str, Starts], name: str) -> str:
    """What a switch is compared with: the default, in the precision in which the group has one."""
    return next((own for own in found if own.startswith(f"{DEFAULT} ") and own.split()[1] in name), DEFAULT)


def sections(call: dict, _: str) -> Iterator[str]:
    if found := switches_of(call):
        rows = [
            {"name": name, "own": own, "default": found.get(default_of(found, name))} for name, own in found.items()
        ]
        yield section("Switches", columns(rows, SWITCHES))


def median_ms(own: Starts) -> str:
    return f"{statistics.median(ms for row in own for ms in row['times_ms']):.0f}"


def ratio(own: Starts, default: Starts) -> float:
    """Median ratio of a training's time to the default's, over the rounds of all starts; slow ones skip rounds."""
    pairs = [
        pair
        for rows in zip(own, default, strict=True)
        for pair in zip(*(row["times_ms"] for row in rows), strict=False)
    ]
    return ratio_of(*zip(*pairs, strict=True)).median


def spread(row: dict) -> str:
    """The ratio; if there are several starts, each one's ratio in brackets."""
    own, default = row["own"], row["default"]
    if default is None or own is default:
        return "" if default is None else "1"
    each = [f"{ratio([ours], [others]):.2f}" for ours, others in zip(own, default, strict=True)]
    return f"{ratio(own, default):.2f}" + (f" ({', '.join(each)})" if len(each) > 1 else "")


def code(name: str) -> str:
    """A switch's name in the tables."""
    return f"`{name}`" if "=" in name and "," not in name else name


SWITCHES: Columns = [
    ("switch", lambda row: code(row["name"])),
    ("step, ms", lambda row: median_ms(row["own"])),
    ("time / default", spread),
    ("saved, MiB", lambda row: mib(row["own"][0]["saved_bytes"])),
    ("peak, MiB", lambda row: mib(row["own"][0]["peak_bytes"])),
    ("process, MiB", lambda row: f"{row['own'][0]['process_mib']:.0f}"),
    ("first step, s", lambda row: " and ".join(f"{own['first_step_s']:.0f}" for own in row["own"])),
    ("loss", lambda row: f"{row['own'][0]['loss']:.4f}"),
]


def measured_with(record: dict, part: str) -> dict[str, Starts]:
    """The switches of the call that measured this part alone."""
    return next(switches_of(call) for call in record["calls"] if call["arguments"]["parts"] == [part])


BENCHMARK = frame.Benchmark("training", TrainingArguments, items, measure, sections, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
