"""Part "check": the tests that need a card, those of the layers before those of trainings, with each test's outcome."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from scripts.evidence.gpu.part import Part, Rows, Setting
from scripts.reports.markdown import Columns, columns, section
from scripts.reports.papers import REPOSITORY

PROCESSES = 8  # compile kernels at the same time


def items(setting: Setting) -> dict[str, tuple]:
    """A file of tests each; in a rehearsal, where all are skipped, one of the layers' and one of the trainings'."""
    marked = [file for file in sorted((REPOSITORY / "tests").rglob("test_*.py")) if _has_gpu_tests(file)]
    names = [file.relative_to(REPOSITORY).as_posix() for file in marked]
    in_order = sorted(names, key=lambda name: not name.startswith("tests/keepless"))
    return {name: (name,) for name in (in_order[:1] + in_order[-1:] if setting.rehearse else in_order)}


def _has_gpu_tests(file: Path) -> bool:
    return re.search(r"NEEDS_CUDA|mark\.gpu", file.read_text()) is not None


def measure(setting: Setting, file: str) -> Rows:
    """Run a file's tests in a process of their own. RuntimeError: pytest itself failed."""
    parallel = not setting.rehearse and find_spec("xdist") is not None
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [f"-n{PROCESSES}", "--dist=worksteal", file] if parallel else [file]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"pytest ended with {done.returncode}")
        return [{"file": file, **row} for row in _tests(report)]


def _tests(report: Path) -> Iterator[dict]:
    """{"test", "outcome": passed, failed, error or skipped, "seconds", "message": first line} of each test."""
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else {"failure": "failed"}.get(problem.tag, problem.tag)
        first, *_ = ("" if problem is None else problem.get("message", "")).splitlines() or [""]
        seconds = round(float(case.get("time", 0)), 2)
        yield {"test": case.get("name", ""), "outcome": outcome, "seconds": seconds, "message": first[:300]}


OUTCOMES = ("passed", "failed", "error", "skipped")
FILES: Columns = [
    ("file", "{file}"),
    *((outcome, lambda row, outcome=outcome: str(row[outcome])) for outcome in OUTCOMES),
    ("s", "{seconds:.0f}"),
]


def counts(rows: Rows) -> Rows:
    """A row for each file: the number of tests by outcome, and their seconds."""
    found = []
    for file in dict.fromkeys(row["file"] for row in rows):
        own = [row for row in rows if row["file"] == file]
        outcomes = Counter(row["outcome"] for row in own)
        found.append(
            {"file": file, "seconds": sum(row["seconds"] for row in own)}
            | {outcome: outcomes[outcome] for outcome in OUTCOMES}
        )
    return found


def sections(rows: Rows) -> Iterator[str]:
    yield section("Tests", columns(counts(rows), FILES))
    problems = [row for row in rows if row["outcome"] in ("failed", "error")]
    if problems:
        yield section("Failures", "\n".join(f"- {row['file']} {row['test']}: {row['message']}" for row in problems))
    if reasons := sorted({row["message"] for row in rows if row["outcome"] == "skipped"}):
        yield section("Skipped", "\n".join(f"- {reason}" for reason in reasons))


PART = Part("Tests on a GPU", 5, items, measure, sections)
