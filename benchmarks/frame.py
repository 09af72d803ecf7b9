"""The frame of all benchmarks: items that are measured one by one, their record, and its text."""

import difflib
import gc
import itertools
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from omegaconf import MISSING

from benchmarks.measuring import reason
from benchmarks.rows import Rows, compared, section
from engine.configuration.choices import CONFIGS
from engine.configuration.command_line import configured
from engine.process.allocations import keep_freed_memory
from engine.process.distributed import device_of
from engine.process.output_files import writable_file, write_file
from engine.records.provenance import provenance
from engine.schema.keys import key
from scripts.reports import charts
from scripts.reports.markdown import conditions, in_lines

RESULTS = CONFIGS.parent / "docs" / "results"
# Measured if they are installed.
PACKAGES = ("timm", "segmentation_models_pytorch", "transformers", "peft", "diffusers", "inplace-abn")


@dataclass
class Arguments:
    """Arguments of every benchmark."""

    out: str = MISSING  # FILE.json; pictures are written beside it
    only: list[str] = field(default_factory=list)  # items, or names up to one of their slashes; empty: all


@dataclass
class DeviceArguments(Arguments):
    device: str = key("cpu", one_of=("cpu", "cuda"))  # the device that is measured

    def check(self) -> None:
        device_of(self.device)


@dataclass
class TimedArguments(DeviceArguments):
    threads: int = key(1, above=0)  # of PyTorch on the CPU
    rounds: int = key(15, above=0)  # each measures everything once


@dataclass
class CapturedArguments(TimedArguments):
    captured: bool = False  # also time each step as a CUDA graph, without CPU overhead

    def check(self) -> None:
        super().check()
        if self.captured and self.device != "cuda":
            raise ValueError(f"captured=true needs device=cuda: device={self.device} has no CUDA graphs")


class Benchmark(NamedTuple):
    """A question to measure. docs/results/NAME.md has the answer."""

    name: str
    schema: type[Any]  # of its arguments
    items: Callable[[Any], Mapping[str, tuple]]  # arguments -> {name: what `measure` takes after them}
    measure: Callable[..., Rows]  # a row with "reason" says what could not be measured
    heading: Callable[[dict], tuple[str, str]]  # arguments -> title of the part, and the conditions in words
    # (call, name of its picture) -> sections of its part of the page; by default a table of its rows.
    sections: Callable[[dict, str], Iterable[str]] = lambda call, _: [compared(call["items"].values())]
    picture: Callable[[dict], Figure | None] = lambda call: None


def command(benchmark: Benchmark, text: str | None) -> tuple[Callable[[Any], str], Callable[[], None]]:
    """`carry_out(benchmark, …)` and its command; `about`: text of --help."""
    run = partial(carry_out, benchmark)
    return run, configured(benchmark.name, benchmark.schema, description=f"{text}\n{FILES}")(run)


FILES = """\
FILE.json is written again after each item: the same command goes on with the items that are missing or have failed, and
a call with other arguments is added. Prints its tables, and draws FILE.png if the benchmark has a picture.
"""


def carry_out(benchmark: Benchmark, arguments: Any) -> str:
    """Measure what the record lacks, draw it, print and return its tables. ValueError: an argument is impossible."""
    out = Path(arguments.out)
    if out.suffix != ".json":
        raise ValueError(f"out={arguments.out}: expected a file that ends in .json")
    writable_file("out", out, kind="record")
    record = json.loads(out.read_text()) if out.is_file() else {"calls": []}
    measure(benchmark, arguments, record, out)
    for number, call in current_calls(record):
        figure = benchmark.picture(call)
        if figure is not None:
            charts.save(figure, out.with_name(f"{picture_of(out.stem, number)}.png"))
    text = calls_text(benchmark, record, out.stem)
    print(text)
    return text


def current_calls(record: dict) -> list[tuple[int, dict]]:
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
    for number, call in current_calls(record):
        title, description = benchmark.heading(call["arguments"])
        minutes = f"the run took {call['seconds'] / 60:.1f} minutes"
        paragraph = f"{conditions(call['environment'])}. {description}; {minutes}."
        failed = []
        for item, rows in call["items"].items():
            for row in filter(lambda row: "reason" in row, rows):
                values = ", ".join(str(value) for key, value in row.items() if key != "reason")
                failed.append(f"- {values or item}: {row['reason']}")
        parts.append(section(title, f"```\n{call['command']}\n```", paragraph, level=2))
        parts += benchmark.sections(call, picture_of(name, number))
        if failed:
            parts.append(section("Not measured", "\n".join(failed)))
    return in_lines("\n\n".join(filter(None, parts)))


def rows_of(call: dict, part: str | None = None) -> Rows:
    """All rows, or those with this `part`."""
    return [row for rows in call["items"].values() for row in rows if part in (None, row.get("part"))]


def measure(benchmark: Benchmark, arguments: Any, record: dict, out: Path) -> None:
    """Measure the items that a record lacks, or that have failed, and write it after each."""
    started_s = time.monotonic()
    items = benchmark.items(arguments)
    environment = provenance(PACKAGES)
    chosen = chosen_of(items, arguments.only)
    if hasattr(arguments, "threads"):
        torch.set_num_threads(arguments.threads)
        environment["threads"] = arguments.threads
    if getattr(arguments, "device", "cpu") == "cpu":
        keep_freed_memory()
    call = continued_call(record, arguments, environment)
    before_s = call["seconds"]
    rows_by_item = call["items"]
    for name in chosen:
        if name in rows_by_item and [*map(list, rows_by_item[name])] != [FAILED]:
            continue
        try:
            rows_by_item[name] = benchmark.measure(arguments, *items[name])
        except Exception as error:  # the other items can still be measured
            rows_by_item[name] = [{"reason": reason(error)}]
        torch.compiler.reset()  # compiled code
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        failed = [f": {row['reason']}" for row in rows_by_item[name] if [*row] == FAILED]
        print(f"{time.monotonic() - started_s:6.1f} s  {name}", *failed, sep="", flush=True)
        call["items"] = {name: rows_by_item[name] for name in items if name in rows_by_item}
        call["command"] = command_of(benchmark, arguments, call["items"] if len(rows_by_item) < len(items) else ())
        call["seconds"] = round(before_s + time.monotonic() - started_s, 1)
        write_file(out, json_lines(record))


def continued_call(record: dict, arguments: Any, environment: dict) -> dict:
    """The call of a record with these arguments in this environment; a new one is added if there is none."""
    values = {name: value for name, value in vars(arguments).items() if name not in vars(Arguments())}
    circumstances: dict[str, Any] = {"arguments": values, "environment": environment}
    for _, call in current_calls(record):
        if call.items() >= circumstances.items():
            return call
    # Summaries find a call by its name; a better one may be written into the record.
    call = {"name": environment["commit"], "command": "", **circumstances, "seconds": 0, "items": {}}
    record["calls"].append(call)
    return call


FAILED = ["reason"]  # the keys of the only row of an item


def chosen_of(items: Iterable[str], only: Iterable[str]) -> list[str]:
    """The items that `only` names, all if it is empty. ValueError: it names none."""
    names = list(items)
    names_by_word = {word: [name for name in names if f"{name}/".startswith(f"{word}/")] for word in only}
    for word, chosen in names_by_word.items():
        if not chosen:
            nearest = ", ".join(difflib.get_close_matches(word, names, n=5, cutoff=0))
            raise ValueError(f"only={word}: there is no such item; the nearest names are {nearest}")
    return [name for name in names if not names_by_word or name in itertools.chain(*names_by_word.values())]


def command_of(benchmark: Benchmark, arguments: Any, only: Iterable[str]) -> str:
    """The command that measures the same again."""
    words = [f"python -m benchmarks.{benchmark.name}"]
    default = vars(benchmark.schema())
    for argument, value in {**vars(arguments), "only": [*only], "out": MISSING}.items():
        if value != default[argument]:
            text = json.dumps(value, separators=(",", ":"))
            has_words = isinstance(value, list) and {*"= "} & {*text}  # which need their quotes
            words.append(shlex.quote(f"{argument}={text}") if has_words else f"{argument}={text}".replace('"', ""))
    return " ".join([*words, "out=FILE.json"])


def json_lines(record: dict) -> str:
    """JSON with a line for each row."""
    text = json.dumps(record, indent=0, ensure_ascii=False)
    return re.sub(r"\{[^{}]*\}", lambda row: row[0].replace(",\n", ", ").replace("\n", ""), text) + "\n"
