"""pytest plugin of `make faults`: counts injected and survived faults and writes them to a JSON file and its page.

`@pytest.mark.injects(what, how, into="trainings")`: the test injects the fault `what` once, described by `how`, into a
training or into a single save or file ("files"). A test that injects more faults calls
`record_property("tried", number)`. A passing test survived all of them, a failing test none.
"""

import json
from pathlib import Path

import pytest

from engine.records.provenance import provenance
from scripts.reports.frame import as_text


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-out", metavar="FILE.json", help="where the counts of injected faults are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--faults-out") and not hasattr(config, "workerinput"):  # xdist's workers report to it
        config.pluginmanager.register(Counts(Path(config.getoption("--faults-out"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("injects")) is not None:
            item.user_properties.append(("fault", (*mark.args, mark.kwargs.get("into", "trainings"))))


class Counts:
    """Counts of every injected fault; written at the end of the session."""

    def __init__(self, out: Path):
        self.out = out
        self.rows: dict[tuple[str, str], dict] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "fault" not in properties or report.skipped or (report.when != "call" and report.passed):
            return
        what, how, into = properties["fault"]
        row = self.rows.setdefault((what, how), {"fault": what, "how": how, "into": into, "tried": 0, "survived": 0})
        tried = properties.get("tried", 1)
        row["tried"] += tried
        row["survived"] += tried if report.passed else 0

    def pytest_sessionfinish(self) -> None:
        rows = sorted(self.rows.values(), key=lambda row: (row["into"] == "files", row["fault"], row["how"]))
        self.out.write_text(as_text({"environment": provenance(), "faults": rows}))
        self.out.with_suffix(".md").write_text(page(json.loads(self.out.read_text())))


def page(record: dict) -> str:
    """The page for a record written by `Counts`."""
    rows = record["faults"]
    counts = {
        into: [sum(row[key] for row in rows if row["into"] == into) for key in ("tried", "survived")]
        for into in ("trainings", "files")
    }
    (runs, runs_survived), (files, files_survived) = counts.values()
    versions = ", ".join(f"{name} {version}" for name, version in record["environment"]["versions"].items())
    lines = [
        "# Faults",
        "",
        f"{runs} faults were injected into small trainings: {runs_survived} survived, **{runs - runs_survived} lost**.",
        f"{files} were injected into single saves and files: {files_survived} survived, **{files - files_survived} "
        "lost**.",
        "Made by `make faults`.",
        "",
        "A fault in a training counts as survived if the run says what is wrong, ends with the right exit status, and",
        "with `resume=auto` ends with the same weights, averaged weights and optimiser state as an undisturbed run, to",
        "the bit, with every step exactly once in `metrics.jsonl`. If the number of processes changes, the run must",
        "complete all its steps. A fault in a single save or file (the last rows) counts as survived if loading",
        "afterwards gives exactly what was saved before or during the fault.",
        "",
        "| fault | how it was injected | tried | survived | lost |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lost = row["tried"] - row["survived"]
        lines.append(f"| {row['fault']} | {row['how']} | {row['tried']} | {row['survived']} | {lost} |")
    lines += ["", f"{record['environment']['hardware']}; {versions}; commit {record['environment']['commit']}", ""]
    return "\n".join(lines)
