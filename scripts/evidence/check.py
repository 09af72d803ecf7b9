"""Run the tests that need a CUDA device, layers first, then trainings, and record their outcomes:

python -m scripts.evidence.check out=FILE.json
python -m scripts.evidence.check only=[tests/keepless] out=FILE.json
python -m scripts.evidence.check minutes=8 out=FILE.json
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from engine.schema.keys import key
from scripts.reports import frame
from scripts.reports.markdown import Columns, Rows, columns, section
from scripts.reports.papers import REPOSITORY

OUTCOMES = ("passed", "failed", "error", "skipped")


@dataclass
class CheckArguments(frame.Arguments):
    processes: int = key(8, above=0)  # compile kernels at the same time
    most: int | None = key(None, above=0)  # files, from both ends; null: all


def items(arguments: CheckArguments) -> dict[str, tuple[str]]:
    """A file of tests each."""
    marked = re.compile(r"NEEDS_CUDA|mark\.gpu")
    found = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    names = sorted(path.relative_to(REPOSITORY).as_posix() for path in found)
    names.sort(key=lambda name: not name.startswith("tests/keepless/"))
    if arguments.most is not None:
        names = names[: -(-arguments.most // 2)] + names[len(names) - arguments.most // 2 :]
    return {name: (name,) for name in names}


def measure(arguments: CheckArguments, file: str) -> Rows:
    """Run a file's tests in a process of their own. RuntimeError: pytest itself failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    if arguments.processes > 1 and find_spec("xdist") is not None:
        command += [f"-n{arguments.processes}", "--dist=worksteal"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]  # such as "3 passed, 1 skipped in 2.51s"
    if not (took := re.search(r" in ([\d.]+)s", last)):
        raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"pytest ended with {done.returncode}")
    counts = {name: int(count) for count, name in re.findall(rf"(\d+) ({'|'.join(OUTCOMES)})", last)}
    row: dict = {"file": file, **{name: counts.get(name, 0) for name in OUTCOMES}, "test_seconds": float(took[1])}
    return [{**row, "problems": [line[:300] for line in done.stdout.splitlines() if re.match("(FAILED|ERROR) ", line)]}]


COLUMNS: Columns = [
    ("file", "{file}"),
    *((outcome, f"{{{outcome}}}") for outcome in OUTCOMES),
    ("s", "{test_seconds:.0f}"),
]


def about(arguments: dict) -> tuple[str, str]:
    return "Tests on a GPU", f"{arguments['processes']} processes"


def sections(call: dict, _: str) -> Iterator[str]:
    rows = frame.rows_of(call)
    yield columns(rows, COLUMNS)
    if problems := [f"- {problem}" for row in rows for problem in row["problems"]]:
        yield section("Failures", "\n".join(problems))


BENCHMARK = frame.Benchmark("check", CheckArguments, items, measure, sections, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
