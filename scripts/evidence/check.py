"""Run the tests that need a CUDA device, layers first, then trainings, and record their outcomes:

python -m scripts.evidence.check out=FILE.json
python -m scripts.evidence.check only=[tests/keepless] out=FILE.json
python -m scripts.evidence.check minutes=8 out=FILE.json
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

from scripts.reports import frame
from scripts.reports.markdown import Rows
from scripts.reports.papers import REPOSITORY

OUTCOMES = ("passed", "failed", "error", "skipped")


def items(arguments: frame.Arguments) -> dict[str, tuple[str]]:
    """A file of tests each."""
    marked = re.compile(r"NEEDS_CUDA|mark\.gpu")
    found = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    names = sorted(path.relative_to(REPOSITORY).as_posix() for path in found)
    names.sort(key=lambda name: not name.startswith("tests/keepless/"))
    return {name: (name,) for name in names}


def measure(arguments: frame.Arguments, file: str) -> Rows:
    """Run a file's tests in a process of their own. RuntimeError: pytest itself failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
    if find_spec("xdist") is not None:  # kernels are compiled at the same time
        command += ["-nauto", "--dist=worksteal"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]  # such as "3 passed, 1 skipped in 2.51s"
    if not (took := re.search(r" in ([\d.]+)s", last)):
        raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"pytest ended with {done.returncode}")
    counts = {name: int(count) for count, name in re.findall(rf"(\d+) ({'|'.join(OUTCOMES)})", last)}
    row: dict = {"file": file, **{name: counts.get(name, 0) for name in OUTCOMES}, "s": float(took[1])}
    return [{**row, "problems": [line[:300] for line in done.stdout.splitlines() if re.match("(FAILED|ERROR) ", line)]}]


def about(arguments: dict) -> tuple[str, str]:
    return "Tests on a GPU", "A process for each core, if pytest-xdist is installed"


BENCHMARK = frame.Benchmark("check", frame.Arguments, items, measure, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
