"""A run of the benchmark."""

import json
import random
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields

from omegaconf import MISSING

from datasets import synthetic
from engine.distributed import device_of
from engine.provenance import provenance
from engine.schema.keys import key

from .elsewhere import Elsewhere
from .overhead import Overhead
from .switches import ALLOCATION, COMPILED, DEFAULT, SWITCHES, Switch
from .training import Training

GROUPS = {"switches": SWITCHES, "allocation": ALLOCATION, "compile": COMPILED}
PARTS = ("overhead", *GROUPS)
SLOW_MS = 5000  # a training whose steps take longer is in the first two rounds only


@dataclass
class TrainingBenchmark:
    out: str = MISSING  # FILE.json; the page is written beside it
    measure: bool = True
    device: str = key("cpu", one_of=("cpu", "cuda"))
    recipe: str | None = "camvid/resnext_small"  # experiment whose network is trained; null: the default one
    threads: int = key(2, above=0)
    crop_size: int = key(240, above=0)  # pixels of a side, configs/data/camvid.yaml
    crops: int = key(8, above=0)
    overhead_crops: int = key(4, least=2)  # for steps of about 200 ms
    overhead_steps: int = key(10, above=0)  # of each loop in each round
    overhead_rounds: int = key(20, above=0)
    starts: int = key(2, above=0)  # of all processes: memory lies elsewhere in each
    rounds: int = key(10, above=0)  # of each start
    warm_up: int = key(3, above=0)  # steps
    parts: list[str] = field(default_factory=lambda: list(PARTS))


def measure(config: TrainingBenchmark) -> dict:
    """Times of both loops, a row for each switch, the reasons why others have none, arguments and environment.

    Raises ValueError where an argument or the device is not possible.
    """
    if not config.parts or not set(config.parts) <= set(PARTS):
        raise ValueError(f"parts={config.parts}: expected some of {', '.join(PARTS)}")
    device = device_of(config.device)
    started_s = time.monotonic()
    known = {**provenance(), "threads": config.threads}
    synthetic(None, "train")  # written once, before the processes ask for it
    overhead_ms = _overhead(config) if "overhead" in config.parts else {}
    print(f"{time.monotonic() - started_s:6.1f} s  overhead", flush=True)
    chosen = list(dict.fromkeys(switch for part in config.parts for switch in GROUPS.get(part, ())))
    left_out = {s.name: "needs a CUDA device" for s in chosen if s.only_cuda and device.type != "cuda"}
    chosen = [switch for switch in chosen if switch.name not in left_out]
    starts = []
    for _ in range(config.starts if chosen else 0):
        rows, failed = _start(config, chosen)
        starts.append(rows)
        if DEFAULT in failed:  # there is nothing to compare with
            raise failed[DEFAULT]
        left_out |= {name: _reason(error) for name, error in failed.items()}
        chosen = [switch for switch in chosen if switch.name not in failed]
        print(f"{time.monotonic() - started_s:6.1f} s  {len(rows)} switches", flush=True)
    return {
        "command": command_line(config),
        "arguments": {name: value for name, value in asdict(config).items() if name not in ("out", "measure")},
        "environment": known,
        "seconds": round(time.monotonic() - started_s, 1),
        "overhead_ms": overhead_ms,
        "left_out": [{"switch": name, "reason": reason} for name, reason in left_out.items()],
        "rows": [_row(switch.name, [rows[switch.name] for rows in starts]) for switch in chosen],
    }


def common(config: TrainingBenchmark, crops: int) -> tuple[str, ...]:
    """The overrides of train_seg.py that hold for everything that is measured: float32, drawn street scenes."""
    experiment = () if config.recipe is None else (f"experiment={config.recipe}",)
    # As wide as CamVid's pictures.
    data = ("data=synthetic", "data.base_size=480", f"data.crop_size={config.crop_size}", "data.workers=0")
    trainer = (f"trainer.device={config.device}", "trainer.precision=float32")
    return (*experiment, *data, f"data.crops_per_minibatch={crops}", *trainer)


def command_line(config: TrainingBenchmark) -> str:
    """The command line that measures the same again."""
    default = TrainingBenchmark()
    words = [
        f"{entry.name}={json.dumps(getattr(config, entry.name), separators=(',', ':'))}".replace('"', "")
        for entry in fields(config)[2:]
        if getattr(config, entry.name) != getattr(default, entry.name)
    ]
    return " ".join(["python -m scripts.bench_training", *words, "out=FILE.json"])


def _overhead(config: TrainingBenchmark) -> dict[str, list[float]]:
    """{"bare": [ms per step in each round], "real": [...]}"""
    with Elsewhere(Overhead, common(config, config.overhead_crops), config.threads, config.overhead_steps) as loops:
        return loops.call("rounds", config.overhead_rounds)


def _reason(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"


def _row(name: str, starts: list[dict]) -> dict:
    """One row from those of all starts: what differs between processes as a list, the rest of the first one."""
    each = {key: [row[key] for row in starts] for key in ("times_ms", "process_mib", "first_step_s")}
    return {"switch": name, **starts[0], **each}


def _start(config: TrainingBenchmark, chosen: list[Switch]) -> tuple[dict[str, dict], dict[str, Exception]]:
    """Rows of one start of a process per switch, and what failed; each round takes a step in all, in random order."""
    failed: dict[str, Exception] = {}
    with ExitStack() as stack:
        shared = common(config, config.crops)
        running = {
            switch.name: stack.enter_context(Elsewhere(Training, shared, switch, config.threads)) for switch in chosen
        }

        def ask(name: str, method: str, *arguments):
            try:
                return running[name].call(method, *arguments)
            except Exception as error:  # of a compiler, say: the others can still be measured
                failed[name] = error
                running.pop(name).close()

        rows = {name: ask(name, "warm_up", config.warm_up) for name in list(running)}
        times_ms = {name: [] for name in rows}
        shuffle = random.Random(0)
        for number in range(config.rounds):
            for name in shuffle.sample(list(running), len(running)):
                if number < 2 or times_ms[name][-1] < SLOW_MS:
                    times_ms[name].append(ask(name, "step"))
        for name in list(running):
            rows[name] |= ask(name, "facts") or {}
        return {name: {**rows[name], "times_ms": times_ms[name]} for name in running}, failed
