"""Speed and memory of training steps under every switch, and the training loop's overhead:

    python -m scripts.evidence.training [device=cpu|cuda] out=FILE.json
    python -m scripts.evidence.training rounds=3 starts=1 out=FILE.json
    python -m scripts.evidence.training measure=false out=FILE.json

`parts` chooses groups of switches, and the overhead.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import synthetic
from engine.schema.keys import key
from scripts.evidence import frame
from scripts.evidence.measuring import Elsewhere
from scripts.evidence.training_steps import BFLOAT16, COMPILE, DEFAULT, GROUPS, STANDARD, Overhead, Switch, Training
from scripts.reports.markdown import Columns, columns, section

PARTS = ("overhead", *GROUPS)
OF_EACH_START = ("times_ms", "process_mib", "first_step_s")  # the rest of a row is of the first start
SLOW_MS = 5000  # a training with slower steps takes part in the first two rounds only
STEP_MS = (100, 300)  # the overhead is judged only if a bare step takes this long


@dataclass
class TrainingArguments(frame.DeviceArguments):
    recipe: str | None = "camvid/resnext_small"  # experiment whose network is trained; null: the default one
    threads: int = key(2, above=0)  # of PyTorch
    crop_size: int = key(240, above=0)  # pixels, configs/data/camvid.yaml
    crops: int = key(8, above=0)  # per step
    overhead_crops: int = key(4, least=2)  # for steps of about 200 ms
    overhead_steps: int = key(10, above=0)  # of each loop in each round
    overhead_rounds: int = key(20, above=0)  # each times both loops
    starts: int = key(2, above=0)  # of all processes; their memory is laid out differently each time
    rounds: int = key(10, above=0)  # of each start
    warm_up: int = key(3, above=0)  # steps
    parts: list[str] = field(default_factory=lambda: list(PARTS))  # what is measured

    def check(self) -> None:
        super().check()
        frame.check_choices("parts", self.parts, PARTS)

    def overrides(self, crops: int) -> tuple[str, ...]:
        """The overrides of train_seg.py shared by everything measured: float32, drawn street scenes."""
        experiment = () if self.recipe is None else (f"experiment={self.recipe}",)
        # As wide as CamVid's pictures.
        data = ("data=synthetic", "data.base_size=480", f"data.crop_size={self.crop_size}", "data.workers=0")
        trainer = (f"trainer.device={self.device}", "trainer.precision=float32")
        return (*experiment, *data, f"data.crops_per_minibatch={crops}", *trainer)


def measure(arguments: TrainingArguments, clock: frame.Clock) -> dict:
    """Measure both loops and every switch; switches that cannot run here are listed with the reason."""
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
    return {
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


def one_start(arguments: TrainingArguments, chosen: dict[str, Switch]) -> tuple[dict[str, dict], dict[str, Exception]]:
    """Start a process for each switch and time its steps in rounds. Returns rows by switch, and errors by switch."""
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
        network=arguments["recipe"] or "the default network",
        of_starts=_plural(arguments["starts"], "start"),
        of_each=_plural(arguments["rounds"], "round"),
        targets=frame.target_table(targets(result)),
        switches=_switches(result),
    )


def targets(result: dict) -> list[frame.Target]:
    found = []
    if times := result["overhead_ms"]:
        bare_ms, ratio = statistics.median(times["bare"]), frame.ratio_of(times["real"], times["bare"])
        measured = f"{ratio:.3f} of {bare_ms:.0f} ms, {len(times['bare'])} rounds"
        verdict = frame.PASS if ratio.median <= 1.03 else frame.MISS
        if not STEP_MS[0] <= bare_ms <= STEP_MS[1]:
            verdict = frame.NOT_MEASURED
        about, to_reach = "time of the training loop to bare steps", "at most 1.03 of a step of about 200 ms"
        found.append(frame.Target(about, to_reach, measured, verdict))
    rows = {row["switch"]: row for row in result["rows"]}
    if "norms" in result.get("arguments", {}).get("parts", []):  # measured in several starts
        pairs = ((DEFAULT, STANDARD, "float32"), (BFLOAT16, f"{STANDARD} {BFLOAT16}", "bfloat16"))
        found += [
            _against_standard(rows[ours], rows[standard], about)
            for ours, standard, about in pairs
            if {ours, standard} <= rows.keys()
        ]
    limits = {switch.name: switch.graphs for switch in GROUPS["compile"] if COMPILE in switch.overrides}
    return [*found, *(_graphs(row, limits[name]) for name, row in rows.items() if name in limits)]


def _against_standard(ours: dict, standard: dict, about: str) -> frame.Target:
    """Target: in-place norms cost a step no time."""
    verdict = frame.PASS if round(ratio(ours, standard), 2) <= 1 else frame.MISS
    return frame.Target(f"in-place to standard norms, {about}", "at most 1.00", spread(ours, standard), verdict)


def _graphs(row: dict, limit: int) -> frame.Target:
    """Target: torch.compile makes as few graphs as it can, all in the first steps."""
    later = row["graphs"] - row["graphs_warm"]
    reached = row["graphs"] <= limit and not row["graph_breaks"] and not later
    first_steps = " and ".join(f"{seconds:.0f} s" for seconds in row["first_step_s"])
    return frame.Target(
        f"`{row['switch']}`",
        f"{_plural(limit, 'graph')}, no break, none made again",
        f"{_plural(row['graphs'], 'graph')}, {row['graph_breaks']} breaks, {later} made again; "
        f"first step {first_steps}",
        frame.PASS if reached else frame.MISS,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _switches(result: dict) -> str:
    default = {row["switch"]: row for row in result["rows"]}.get(DEFAULT, {})
    shown: Columns = [
        ("switch", lambda row: code(row["switch"])),
        ("step, ms", median_ms),
        ("time to default", lambda row: "1" if row is default else spread(row, default)),
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
