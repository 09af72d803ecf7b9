"""Part "check": run the tests that need a card, layers first, then trainings, and record their outcomes."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
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
        return [{"file": file, **_outcomes(report)}]


def _outcomes(report: Path) -> dict:
    """The number of tests by outcome, their seconds, and the first line about each that did not pass."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    tests, failed, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    row: dict = {"passed": tests - failed - errors - skipped, "failed": failed, "error": errors, "skipped": skipped}
    row |= {"seconds": float(suite.get("time", 0)), "problems": [], "reasons": []}
    for case in suite.iter("testcase"):
        for problem in (child for child in case if child.tag in ("failure", "error", "skipped")):
            first, *_ = problem.get("message", "").splitlines() or [""]
            if problem.tag == "skipped":
                row["reasons"].append(first[:300])
            else:
                row["problems"].append(f"{case.get('name')}: {first[:300]}")
    return row


FILES: Columns = [
    ("file", "{file}"),
    *((outcome, f"{{{outcome}}}") for outcome in ("passed", "failed", "error", "skipped")),
    ("s", "{seconds:.0f}"),
]


def sections(rows: Rows) -> Iterator[str]:
    yield section("Tests", columns(rows, FILES))
    if problems := [f"- {row['file']} {problem}" for row in rows for problem in row["problems"]]:
        yield section("Failures", "\n".join(problems))
    if reasons := sorted({f"- {reason}" for row in rows for reason in row["reasons"]}):
        yield section("Skipped", "\n".join(reasons))


PART = Part("Tests on a GPU", 5, items, measure, sections)
