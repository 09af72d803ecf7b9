"""Shared by all benchmarks: arguments, interleaved rounds, ratios, records and pages."""

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.choices import CONFIGS
from engine.configuration.command_line import configured
from engine.distributed import device_of
from engine.output_files import replace_file, write_file
from engine.records.provenance import provenance
from engine.schema.keys import key
from scripts.reports import charts
from scripts.reports.markdown import conditions

MIB, GIB = 2**20, 2**30
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}  # in titles

FILES = """
FILE.md, beside FILE.json, has the tables, and shows FILE.png, if there is a chart. `measure=false` makes page
and chart again from FILE.json.
"""
FOLDERS = {
    "root": "DIR",
    "checkpoints": "FOLDER",
    "originals": "FILE.npz",
}  # arguments with places of this machine, as commands name them
RESULTS = CONFIGS.parent / "docs" / "results"
TEMPLATES = RESULTS / "templates"

A = TypeVar("A", bound="Arguments")


@dataclass
class Arguments:
    """Arguments of every benchmark."""

    out: str = MISSING  # FILE.json; the page and the chart are written beside it
    measure: bool = True  # false: make the page again from FILE.json

    def file(self) -> Path:
        """The record. ValueError: it is no .json file."""
        if not self.out.endswith(".json"):
            raise ValueError(f"out={self.out}: expected a file that ends in .json")
        return Path(self.out)

    def known(self) -> dict[str, Any]:
        """The arguments that a record holds. Files and folders of this machine are left out."""
        return {name: value for name, value in vars(self).items() if name not in ("out", "measure", *FOLDERS)}


@dataclass
class DeviceArguments(Arguments):
    device: str = key("cpu", one_of=tuple(DEVICES))  # the device that is measured

    def check(self) -> None:
        device_of(self.device)


class Clock:
    """Time since a benchmark started, and its progress in the terminal."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def report(self, done: object) -> None:
        print(f"{self.seconds:6.1f} s  {done}", flush=True)


def benchmark(
    name: str,
    schema: type[A],
    measure: Callable[[A, Clock], dict | Iterator[dict]],
    page: Callable[[dict, str], str],
    pictures: Callable[[dict], Mapping[str, Figure]] = lambda record: {},
    about: str | None = None,
) -> tuple[Callable[[DictConfig], Path], Callable[[], None]]:
    """Returns `run(values)`, which writes FILE.json and FILE.md and returns the page's path, and its command.

    `name` is the module in `scripts.evidence`.

    `measure(arguments, clock)` returns the results; their "arguments" and "environment", if any, are merged into the
    record's own. It may also yield results several times; each replaces the record, so a stopped run leaves one.
    `page(record, FILE)` returns the page's text, and `pictures(record)` its charts: {suffix: figure of FILEsuffix.png}.
    `about` is the text of --help, by default the docstring of the module of `measure`.
    `run` raises ValueError if an argument is impossible, or if there is no record to make a page from.
    """

    def run(values: DictConfig) -> Path:
        arguments = configuration.typed(values, schema)
        out = arguments.file()
        if arguments.measure:
            clock = Clock()
            environment = {**provenance(), "threads": torch.get_num_threads()}  # as it was at the start
            results = measure(arguments, clock)
            for found in [results] if isinstance(results, dict) else results:
                result = {
                    "command": command_line(name, arguments),
                    "arguments": arguments.known() | found.pop("arguments", {}),
                    "environment": environment | found.pop("environment", {}),
                    "seconds": round(clock.seconds, 1),
                    **found,
                }
                replace_file(out, as_text(result))
        elif not out.is_file():
            raise ValueError(f"measure=false makes the page of a record, and {out} does not exist")
        record = json.loads(out.read_text())
        for suffix, figure in pictures(record).items():
            charts.save(figure, out.with_name(f"{out.stem}{suffix}.png"))
        text = out.with_suffix(".md")
        write_file(text, page(record, out.stem))
        return text

    @configured(name, schema, about=about or f"{sys.modules[measure.__module__].__doc__}{FILES}")
    def main(values: DictConfig) -> None:
        print(run(values))

    return run, main


def command_line(name: str, arguments: Arguments) -> str:
    """The command that measures the same again."""
    default, words = type(arguments)(), [f"python -m scripts.evidence.{name}"]
    for argument, value in vars(arguments).items():
        if argument not in ("out", "measure") and value != getattr(default, argument):
            text = FOLDERS.get(argument) or json.dumps(value, separators=(",", ":")).replace('"', "")
            words.append(f"{argument}={text}")
    return " ".join([*words, "out=FILE.json"])


def check_choices(name: str, given: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError unless the list `name` names some of `known`."""
    if not given or not set(given) <= set(known):
        raise ValueError(f"{name}={list(given)}: expected some of {', '.join(known)}")


def interleaved(timers: Mapping[str, Callable[[int], float | None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each timer in every round. A round calls each timer once with its number, in a new random order.

    A timer may return None to skip a round.
    """
    shuffle = random.Random(0)
    times_ms: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(rounds):
        for name in shuffle.sample(list(timers), len(timers)):
            ms = timers[name](number)
            if ms is not None:
                times_ms[name].append(round(ms, 5))
    return times_ms


class Ratio(NamedTuple):
    """Median and quartiles; f"{ratio:.2f}" prints them all."""

    median: float
    lower: float
    upper: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.lower:{spec}} – {self.upper:{spec}})"


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratios of our times to others' within each round."""
    ratios = [own / other for own, other in zip(ours, others, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), lower, upper)


def grouped(rows: Iterable[dict], by: Sequence[str], name: str) -> dict[str, dict[str, dict]]:
    """{values of the keys `by`: {value of the key `name`: row}}; a row finds its group in row["beside"]."""
    groups: dict[str, dict[str, dict]] = {}
    for row in rows:
        group = groups.setdefault(", ".join(str(row[key]) for key in by), {})
        group[row[name]] = {**row, "beside": group}
    return groups


def relative_time(row: dict, other: str) -> str:
    """A cell of a table: the time of this row, relative to the row `other` of the same group."""
    base = row["beside"][other]
    return "1" if base is row else f"{ratio_of(row['times_ms'], base['times_ms']):.2f}"


def time_ratio(rows: Mapping[str, dict], ours: str, others: str) -> Ratio:
    """`ratio_of` the times of two rows of a group."""
    return ratio_of(rows[ours]["times_ms"], rows[others]["times_ms"])


def longer(ratios: Mapping[str, float]) -> str:
    """Where we take longer than another: the names with a ratio above 1, {name: ratio of our time to the other's}."""
    return ", ".join(f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if round(ratio, 2) > 1) or "none"


def reason(error: Exception) -> str:
    """Why a measurement failed, for the record."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"


def mib(count: float | None, digits: int = 1) -> str:
    """Bytes in MiB for a table; nothing if they are not known."""
    return "" if count is None else f"{count / MIB:.{digits}f}"


def page_text(template: str, result: dict, **parts: object) -> str:
    """The page of a record: a file of docs/results/templates with its placeholders filled.

    They are `parts`, of which a list is paragraphs, and the record's command, arguments and conditions.
    """
    known = {
        **result["arguments"],
        "command": result["command"],
        "conditions": conditions(result["environment"]),
        "minutes": result["seconds"] / 60,
        "of_rounds": prose("parts/rounds"),
        **{name: "\n\n".join(part) if isinstance(part, list) else part for name, part in parts.items()},
    }
    text = (TEMPLATES / f"{template}.md").read_text().format_map(known)
    return re.sub(r"\n{3,}", "\n\n", text)  # around a part that is empty


def prose(name: str) -> str:
    """A paragraph that needs no numbers: a file of docs/results/templates, or nothing if there is none."""
    file = TEMPLATES / f"{name}.md"
    return file.read_text().strip() if file.is_file() else ""


def as_text(result: dict) -> str:
    """JSON with one line for each row of a list of rows."""
    return "{\n" + ",\n".join(f'"{key}": {_value(value)}' for key, value in result.items()) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value, indent=1)


def begun(arguments: Arguments, environment: dict) -> dict:
    """The record of an earlier call with the same arguments, except for `only`; {} if there is none.

    Raises:
        ValueError: arguments, hardware or versions were others. Versions of more packages may be known now.
    """
    out = arguments.file()
    if not out.is_file():
        return {}
    record = json.loads(out.read_text())
    earlier, now = (
        {**known, "hardware": about["hardware"], **about["versions"]}
        for known, about in ((record["arguments"], record["environment"]), (arguments.known(), environment))
    )
    differing = ", ".join(
        f"{name}={value}" for name, value in earlier.items() if name != "only" and now.get(name) != value
    )
    if differing:
        raise ValueError(f"out={out} holds results of another call ({differing}): repeat it, or give another file")
    return record


def commits(record: dict, environment: dict) -> str | None:
    """The commits of a record and of the code that runs now."""
    before = record.get("environment", {}).get("commit") or ""
    return ", ".join(dict.fromkeys(filter(None, [*before.split(", "), environment["commit"]]))) or None
