"""The frame of all benchmarks: items that are measured one by one and resumed, their record, and its text."""

import difflib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.choices import CONFIGS
from engine.configuration.command_line import configured
from engine.process.allocations import keep_freed_memory
from engine.process.distributed import device_of
from engine.process.output_files import replace_file
from engine.records.provenance import provenance
from engine.schema.keys import key
from scripts.reports import charts
from scripts.reports.markdown import Rows, conditions, listed, section, without_reasons
from scripts.reports.measuring import process

RESULTS = CONFIGS.parent / "docs" / "results"
PACKAGES = ("timm", "segmentation_models_pytorch", "inplace-abn")  # measured if they are installed
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}  # in titles


@dataclass
class Arguments:
    """Arguments of every benchmark."""

    out: str = MISSING  # FILE.json; pictures are written beside it
    measure: bool = True  # false: only print and draw what FILE.json holds
    only: list[str] = field(default_factory=list)  # items, or names up to one of their slashes; empty: all


@dataclass
class DeviceArguments(Arguments):
    device: str = key("cpu", one_of=tuple(DEVICES))  # the device that is measured

    def check(self) -> None:
        device_of(self.device)


@dataclass
class TimedArguments(DeviceArguments):
    threads: int = key(1, above=0)  # of PyTorch on the CPU
    rounds: int = key(15, above=0)  # each measures everything once


@dataclass
class CapturedArguments(TimedArguments):
    captured: bool = False  # also time each step as a CUDA graph, where the host's time does not count

    def check(self) -> None:
        super().check()
        if self.captured and self.device != "cuda":
            raise ValueError(f"captured=true needs device=cuda: device={self.device} has no CUDA graphs")


class Benchmark(NamedTuple):
    """A question to measure. docs/results/NAME.md has the answer."""

    name: str
    schema: type[Any]  # of its arguments
    items: Callable[[Any], Mapping[str, tuple]]  # arguments -> {name: what `measure` takes after them}
    measure: Callable[..., Rows]  # in another process; a row with "reason" says what could not be measured
    about: Callable[[dict], tuple[str, str]]  # arguments -> title of the part, and the conditions in words
    # (call, name of its picture) -> sections of its part of the page; by default a table of its rows.
    sections: Callable[[dict, str], Iterable[str]] = lambda call, _: listed(without_reasons(rows_of(call)))
    picture: Callable[[dict], Figure | None] = lambda call: None
    apart: bool = False  # each item runs in its own process


def command(benchmark: Benchmark, about: str | None) -> tuple[Callable[[DictConfig], str], Callable[[], None]]:
    """`run(values)`, see `carry_out`, and its command; `about`: text of --help."""

    def run(values: DictConfig) -> str:
        return carry_out(benchmark, configuration.typed(values, benchmark.schema))

    return run, configured(benchmark.name, benchmark.schema, about=f"{about}\n{FILES}")(run)


FILES = """\
FILE.json is written again after each item: the same command continues a call that was stopped, and a call with other
arguments is added. Prints its tables, and draws FILE.png if the benchmark has a picture.
"""


def carry_out(benchmark: Benchmark, arguments: Any) -> str:
    """Measure what the record lacks, draw it, print and return its tables.

    ValueError: an argument is impossible, or there is no record.
    """
    out = Path(arguments.out)
    if out.suffix != ".json":
        raise ValueError(f"out={arguments.out}: expected a file that ends in .json")
    if arguments.measure:
        measure(benchmark, arguments)
    if not out.is_file():
        raise ValueError(f"measure=false shows a record, and {out} does not exist")
    record = json.loads(out.read_text())
    draw(benchmark, record, out)
    text = calls_text(benchmark, record, out.stem)
    print(text)
    return text


def draw(benchmark: Benchmark, record: dict, out: Path) -> None:
    """Write the pictures of a record beside it."""
    for number, call in written_here(record):
        figure = benchmark.picture(call) if call["items"] else None
        if figure is not None:
            charts.save(figure, out.with_name(f"{picture_of(out.stem, number)}.png"))


def written_here(record: dict) -> list[tuple[int, dict]]:
    """The calls whose tables this code writes, and their numbers.

    The other calls have a `code`, the commit that can measure them again; their tables stand on the page as text.
    """
    return [(number, call) for number, call in enumerate(record["calls"]) if "code" not in call]


def picture_of(name: str, number: int) -> str:
    """The name of a call's picture, without suffix."""
    return f"{name}_{number + 1}" if number else name


def calls_text(benchmark: Benchmark, record: dict, name: str) -> str:
    """What the page `name` says of a record: a part for each call, with its command and conditions."""
    parts = []
    for number, call in written_here(record):
        title, words = benchmark.about(call["arguments"])
        took = f"{conditions(call['environment'])}. {words}; the run took {call['seconds'] / 60:.1f} minutes."
        left = [f"- {item}: {why}" for item, why in call["left"].items()]
        left += [f"- {named(row)}: {row['reason']}" for row in rows_of(call) if "reason" in row]
        parts.append(section(title, f"```\n{call['command']}\n```", took, level=2))
        parts += benchmark.sections(call, picture_of(name, number)) if call["items"] else ()
        parts += [section("Not measured", "\n".join(left))] * bool(left)
    return "\n\n".join(filter(None, parts))


def rows_of(call: dict, part: str | None = None) -> Rows:
    """All rows, or those with this `part`."""
    return [row for rows in call["items"].values() for row in rows if part in (None, row.get("part"))]


def named(row: dict) -> str:
    """What a row is about, in words."""
    return ", ".join(str(value) for name, value in row.items() if name != "reason" and not isinstance(value, list))


def measure(benchmark: Benchmark, arguments: Any) -> None:
    """Measure the items that a record lacks. It is written after each, so the same command continues a stopped call.

    An item that fails is left out with the reason, and the same command tries it again.
    """
    started_s, out = time.monotonic(), Path(arguments.out)
    items, environment = benchmark.items(arguments), provenance(PACKAGES)
    chosen = chosen_of(items, arguments.only)
    if hasattr(arguments, "threads"):
        environment["threads"] = arguments.threads
    record = json.loads(out.read_text()) if out.is_file() else {"calls": []}
    known = {name: value for name, value in vars(arguments).items() if name not in vars(Arguments())}
    new: dict[str, Any] = {"arguments": known, "environment": environment}
    call = next((other for _, other in written_here(record) if other.items() >= new.items()), None)
    if call is None:
        call = {"command": "", **new, "seconds": 0, "left": {}, "items": {}}
        record["calls"].append(call)
    before_s = call["seconds"]
    with ExitStack() as stack:
        running: ProcessPoolExecutor | None = None
        for name in [name for name in chosen if name not in call["items"]]:
            running = running or stack.enter_context(process(_prepare, arguments))
            try:
                call["items"][name] = running.submit(_rows, benchmark.measure, arguments, items[name]).result()
                call["left"].pop(name, None)
            except Exception as error:  # the other items can still be measured
                call["left"][name] = reason(error)
            if benchmark.apart or name in call["left"]:
                stack.close()  # frees its memory
                running = None
            print(f"{time.monotonic() - started_s:6.1f} s  {name}: {call['left'].get(name, 'done')}", flush=True)
            call["items"] = {name: call["items"][name] for name in items if name in call["items"]}
            own = [name for name in items if name in call["items"] | call["left"]]
            call["command"] = command_again(benchmark, arguments, own if len(own) < len(items) else [])
            call["seconds"] = round(before_s + time.monotonic() - started_s, 1)
            replace_file(out, json_lines(record))


def _prepare(arguments: Any) -> None:
    """The state of a process that measures."""
    torch.set_num_threads(getattr(arguments, "threads", 1))
    if getattr(arguments, "device", "cpu") == "cpu":
        keep_freed_memory()


def _rows(measure: Callable[..., Rows], arguments: Any, item: tuple) -> Rows:
    try:
        return measure(arguments, *item)
    finally:
        torch.compiler.reset()  # frees compiled code
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def chosen_of(items: Iterable[str], only: Iterable[str]) -> list[str]:
    """The items that `only` names, all if it is empty. ValueError: it names none."""
    names = list(items)
    for given in only:
        if not any(f"{name}/".startswith(f"{given}/") for name in names):
            known = ", ".join(difflib.get_close_matches(given, names, n=8, cutoff=0))
            raise ValueError(f"only={given}: there is no such item; the nearest names are {known}")
    return [name for name in names if not only or any(f"{name}/".startswith(f"{given}/") for given in only)]


def command_again(benchmark: Benchmark, arguments: Any, only: list[str]) -> str:
    """The command that measures the same again."""
    words, default = [f"python -m scripts.evidence.{benchmark.name}"], benchmark.schema()
    for argument, value in {**vars(arguments), "only": only, "measure": True, "out": MISSING}.items():
        if value != getattr(default, argument):
            text = json.dumps(value, separators=(",", ":"))
            texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
            is_plain = not {*"=, "} & set("".join(texts))
            words.append(f"{argument}={text}".replace('"', "") if is_plain else shlex.quote(f"{argument}={text}"))
    return " ".join([*words, "out=FILE.json"])


def reason(error: Exception) -> str:
    """Why a measurement failed, for the record."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"


def json_lines(record: Any) -> str:
    """JSON with a line for each row of a list of rows."""
    return f"{_lines(record)}\n"


def _lines(value: Any, is_row: bool = False) -> str:
    if isinstance(value, dict) and not is_row and any(isinstance(entry, (dict, list)) for entry in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(entry)}" for name, entry in value.items()) + "\n}"
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(_lines(entry, is_row="items" not in entry) for entry in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
