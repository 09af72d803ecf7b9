"""Run the tests that need a CUDA device, layers first, then trainings, and record their outcomes:

python -m scripts.evidence.check out=FILE.json
python -m scripts.evidence.check only=[layers] out=FILE.json
"""

from engine.process.start import die_with_parent

import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from scripts.reports import frame
from scripts.reports.markdown import Rows
from scripts.reports.papers import REPOSITORY

PROBLEMS = ("failure", "error", "skipped")  # as pytest's report calls them


def items(arguments: frame.Arguments) -> dict[str, tuple[list[str]]]:
    """Test files. Each item is one run of pytest, because its processes take long to start."""
    marked = re.compile(r"NEEDS_CUDA|mark\.gpu")
    found = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    names = sorted(path.relative_to(REPOSITORY).as_posix() for path in found)
    layers = [name for name in names if name.startswith("tests/keepless/")]
    return {"layers": (layers,), "trainings": ([name for name in names if name not in layers],)}


def measure(arguments: frame.Arguments, files: list[str]) -> Rows:
    """Run these tests in separate processes; a row per file. RuntimeError: pytest itself failed.

    {"file", "passed", "failure", "error", "skipped", "s": of all its tests, "problems"}
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--continue-on-collection-errors"]
        if find_spec("xdist") is not None:  # kernels are compiled at the same time
            command += ["-nauto", "--dist=worksteal"]
        kill = partial(die_with_parent, signal.SIGKILL)  # when this item is stopped
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, preexec_fn=kill)
        if done.returncode not in (0, 1) or not report.is_file():  # 1: tests have failed
            raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"pytest ended with {done.returncode}")
        cases: dict[str, list[ElementTree.Element]] = {file: [] for file in files}
        for case in ElementTree.parse(report).iter("testcase"):
            cases.setdefault(str(case.get("file", case.get("name"))), []).append(case)  # only a name: import failed
    return [_row(file, own) for file, own in cases.items()]


def _row(file: str, cases: list[ElementTree.Element]) -> dict:
    outcomes = [next((kind for kind in PROBLEMS if case.find(kind) is not None), "passed") for case in cases]
    row: dict = {"file": file, **{kind: outcomes.count(kind) for kind in ("passed", *PROBLEMS)}}
    failed = [case for case, outcome in zip(cases, outcomes, strict=True) if outcome in ("failure", "error")]
    why = [f"{case.get('name')}: {' '.join(part.get('message', '') for part in case)}"[:300] for case in failed]
    return row | {"s": round(sum(float(case.get("time", 0)) for case in cases), 2), "problems": why}


def about(arguments: dict) -> tuple[str, str]:
    return "Tests on a GPU", "A process for each core, if pytest-xdist is installed"


BENCHMARK = frame.Benchmark("check", frame.Arguments, items, measure, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
