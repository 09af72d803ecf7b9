"""Measure speed and memory of training steps under every switch, and the training loop's overhead:

    python -m scripts.evidence.training [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.training rounds=3 starts=1 out=FILE.json
    python -m scripts.evidence.training measure=false out=FILE.json

`parts` chooses groups of switches, and the overhead.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasets import synthetic
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.measuring import Elsewhere
from scripts.evidence.training_steps import COMPILE, DEFAULT, GROUPS, Overhead, Switch, Training
from scripts.reports.markdown import Columns, columns, section

PARTS = ("overhead", *GROUPS)
OF_EACH_START = ("times_ms", "process_mib", "first_step_s")  # the rest of a row is of the first start
SLOW_MS = 5000  # a training with slower steps takes part in the first two rounds only


# By device: experiment, pixels of a crop, crops per step. Of Table 3, a device's share.
SUITED = {"cpu": ("camvid/resnext_small", 240, 8), "cuda": ("table3/cityscapes_resnext101_inplace_fixed_batch", 512, 4)}


@dataclass
class TrainingArguments(frame.DeviceArguments):
    # Experiment whose network is trained; auto: one that suits the device, see SUITED; null: the default network.
    recipe: str | None = "auto"
    threads: int = key(2, above=0)  # of PyTorch
    crop_size: int | None = key(None, above=0)  # pixels; null: as suits the device
    crops: int | None = key(None, above=0)  # per step; null: as suits the device
    overhead_crops: int = key(4, least=2)  # for steps of about 200 ms
    overhead_steps: int = key(10, above=0)  # of each loop in each round
    overhead_rounds: int = key(20, above=0)  # each times both loops
    starts: int = key(2, above=0)  # of all processes; their memory is laid out differently each time
    rounds: int = key(10, above=0)  # of each start
    warm_up: int = key(3, above=0)  # steps
    parts: list[str] = field(default_factory=lambda: list(PARTS))  # what is measured

    def suited(self) -> "TrainingArguments":
        """A copy in which what depends on the device is chosen."""
        recipe, crop_size, crops = SUITED[self.device]
        return replace(
            self,
            recipe=recipe if self.recipe == "auto" else self.recipe,
            crop_size=self.crop_size or crop_size,
            crops=self.crops or crops,
        )

    def check(self) -> None:
        super().check()
        frame.check_choices("parts", self.parts, PARTS)

    def overrides(self, crops: int) -> tuple[str, ...]:
        """The overrides of train_seg.py shared by everything measured: float32, drawn street scenes."""
        own = self.suited()
        assert own.crop_size is not None
        experiment = () if own.recipe is None else (f"experiment={own.recipe}",)
        # With CamVid's crops, as wide as its pictures.
        data = ("data=synthetic", f"data.base_size={2 * own.crop_size}", f"data.crop_size={own.crop_size}")
        trainer = (f"trainer.device={self.device}", "trainer.precision=float32")
        return (*experiment, *data, "data.workers=0", f"data.crops_per_minibatch={crops}", *trainer)


def measure(arguments: TrainingArguments, clock: frame.Clock) -> dict:
    """Measure both loops and every switch; switches that cannot run here are listed with the reason."""
    arguments = arguments.suited()
    synthetic(None, "train")  # written once, before the processes ask for it
    overhead_ms = {}
    if "overhead" in arguments.parts:
        common = arguments.overrides(arguments.overhead_crops)
        with Elsewhere(Overhead, common, arguments.threads, arguments.overhead_steps) as loops:
            overhead_ms = loops.call("rounds", arguments.overhead_rounds)
        clock.report("overhead")
    chosen = {switch.name: switch for part in arguments.parts for switch in GROUPS.get(part, ())}
    left_out = {s.name: "needs a CUDA device" for s in chosen.values() if s.only_cuda and arguments.device != "cuda"}
    starts: list[dict[str, dict]] = []
    for _ in range(arguments.starts if chosen else 0):
        running = {name: switch for name, switch in chosen.items() if name not in left_out}
        rows, failed = one_start(arguments, running)
        if DEFAULT in failed:  # nothing to compare with
            raise failed[DEFAULT]
        left_out |= {name: frame.reason(error) for name, error in failed.items()}
        starts.append(rows)
        clock.report(f"{len(rows)} switches")
    chosen_for_device = {name: getattr(arguments, name) for name in ("recipe", "crop_size", "crops")}
    return {
        "arguments": chosen_for_device,
        "environment": {"threads": arguments.threads},
        "overhead_ms": overhead_ms,
        "left_out": [{"switch": name, "reason": why} for name, why in left_out.items()],
        "rows": [
            {
                "switch": name,
                **starts[0][name],
                **{kind: [rows[name][kind] for rows in starts] for kind in OF_EACH_START},
            }
            for name in chosen
            if name not in left_out
        ],
    }


Started = tuple[dict[str, dict], dict[str, Exception]]  # rows by switch, and errors by switch


def one_start(arguments: TrainingArguments, chosen: dict[str, Switch]) -> Started:
    """Time the steps of every switch in a process of its own. On CUDA one after the other: each needs the device."""
    rows: dict[str, dict] = {}
    failed: dict[str, Exception] = {}
    for together in [chosen] if arguments.device != "cuda" else [{name: chosen[name]} for name in chosen]:
        found, errors = _together(arguments, together)
        rows |= found
        failed |= errors
    return rows, failed


def _together(arguments: TrainingArguments, chosen: dict[str, Switch]) -> Started:
    """Start a process for each switch and time their steps in rounds."""
    assert arguments.crops is not None
    failed: dict[str, Exception] = {}
    common = arguments.overrides(arguments.crops)
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(Elsewhere(Training, common, switch, arguments.threads))
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
        times_ms = frame.interleaved({name: partial(step, name) for name in chosen}, arguments.rounds)
        facts = {name: ask(name, "facts") for name in chosen}
    kept = [name for name in chosen if name not in failed]
    return {name: {**rows[name], **facts[name], "times_ms": times_ms[name]} for name in kept}, failed


def page(result: dict, _: str) -> str:
    arguments = result["arguments"]
    return frame.page_text(
        "training",
        result,
        parts=", ".join(arguments["parts"]),
        summed_up="[training.md](../training.md#speed-and-precision)",
        network=arguments["recipe"] or "the default network",
        of_starts=_plural(arguments["starts"], "start"),
        of_each=_plural(arguments["rounds"], "round"),
        of_rounds=frame.prose("parts/rounds_in_turn" if arguments["device"] == "cuda" else "parts/rounds"),
        sections=[_overhead(result["overhead_ms"]), _switches(result), _graphs(result["rows"])],
    )


def _overhead(times_ms: dict[str, list[float]]) -> str:
    """The time of the training loop beside bare steps."""
    if not times_ms:
        return ""
    ratio, bare_ms = frame.ratio_of(times_ms["real"], times_ms["bare"]), statistics.median(times_ms["bare"])
    about = f"{ratio:.3f} of the time of bare steps of {bare_ms:.0f} ms, {len(times_ms['bare'])} rounds."
    return section("Overhead of the training loop", about)


GRAPHS: Columns = [
    ("compiled", lambda row: code(row["switch"])),
    ("graphs", "{graphs}"),
    ("breaks", "{graph_breaks}"),
    ("made after the first steps", lambda row: str(row["graphs"] - row["graphs_warm"])),
    ("first step, s", lambda row: " and ".join(f"{seconds:.0f}" for seconds in row["first_step_s"])),
]


def _graphs(rows: list[dict]) -> str:
    """The graphs that torch.compile has made."""
    compiled = [row for row in rows if COMPILE in row["switch"]]
    return section("Graphs of torch.compile", columns(compiled, GRAPHS)) if compiled else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _switches(result: dict) -> str:
    default = {row["switch"]: row for row in result["rows"]}.get(DEFAULT, {})
    shown: Columns = [
        ("switch", lambda row: code(row["switch"])),
        ("step, ms", median_ms),
        ("time / default", lambda row: "1" if row is default else spread(row, default)),
        ("saved, MiB", lambda row: frame.mib(row["saved_bytes"])),
        ("peak, MiB", lambda row: frame.mib(row["peak_bytes"])),
        ("process, MiB", lambda row: f"{row['process_mib'][0]:.0f}"),
        ("loss", "{loss:.4f}"),
    ]
    lines = [columns(result["rows"], shown)]
    for entry in result["left_out"]:
        lines.append(f"| {code(entry['switch'])} | not measured: {entry['reason']} |" + "  |" * 5)
    return section("Switches", "\n".join(lines)) if result["rows"] or result["left_out"] else ""


def median_ms(row: dict) -> str:
    return f"{statistics.median(ms for times in row['times_ms'] for ms in times):.0f}"


def ratio(row: dict, default: dict) -> float:
    """Median ratio of a training's time to the default's, over the rounds of all starts; slow ones skip rounds."""
    starts = zip(row["times_ms"], default["times_ms"], strict=True)
    ours, others = zip(*(pair for times in starts for pair in zip(*times, strict=False)), strict=True)
    return frame.ratio_of(ours, others).median


def spread(row: dict, default: dict) -> str:
    """The ratio; if there are several starts, each one's ratio in brackets."""
    starts = zip(row["times_ms"], default["times_ms"], strict=True)
    each = [f"{ratio({'times_ms': [ours]}, {'times_ms': [others]}):.2f}" for ours, others in starts]
    return f"{ratio(row, default):.2f}" + (f" ({', '.join(each)})" if len(each) > 1 else "")


def code(name: str) -> str:
    """A switch's name in the tables."""
    return f"`{name}`" if "=" in name else name


run, main = frame.benchmark("training", TrainingArguments, measure, page)

if __name__ == "__main__":
    main()
