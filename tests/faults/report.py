"""pytest plugin of `make faults`: counts what the tests marked `fault` tried, and writes it to a file and its page.

`@pytest.mark.fault(what, how, into="trainings")`: the test injects the fault `what`, in the words `how`, once, into a
training or a single save or file ("files"); one that injects it more often says so with
`record_property("tried", number)`. All of them survive where the test passes, none where it fails.
"""

import json
from pathlib import Path

import pytest

from engine.provenance import provenance
from scripts.bench.frame import as_text


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-out", metavar="FILE.json", help="where the counts of injected faults are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--faults-out") and not hasattr(config, "workerinput"):  # the workers of xdist report to it
        config.pluginmanager.register(Counts(Path(config.getoption("--faults-out"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("fault")) is not None:
            item.user_properties.append(("fault", (*mark.args, mark.kwargs.get("into", "trainings"))))


class Counts:
    """What became of every injected fault; written at the end of the session."""

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
    """The page of a file that `Counts` wrote."""
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
        f"{runs} faults were injected into small trainings: {runs_survived} were survived, **{runs - runs_survived} "
        f"lost**; and {files} into single saves and files, **{files - files_survived} lost**. Made by `make faults`.",
        "",
        "A fault is survived where the run says what is wrong, ends with the exit status that it should and, continued",
        "with `resume=auto`, ends with weights, averaged weights and optimiser equal to the bit to those of a run that",
        "nothing happened to, with every step once in `metrics.jsonl`. Where the number of processes changes or images",
        "are skipped, it ends with all of its steps. In the rows of single saves and files, at the end, what is loaded",
        "afterwards is exactly what was saved before the fault or in it.",
        "",
        "| fault | how it was injected | tried | survived | lost |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lost = row["tried"] - row["survived"]
        lines.append(f"| {row['fault']} | {row['how']} | {row['tried']} | {row['survived']} | {lost} |")
    lines += ["", f"{record['environment']['hardware']}; {versions}; commit {record['environment']['commit']}", ""]
    return "\n".join(lines)
