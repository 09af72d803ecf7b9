"""Write every table of the papers with the published scores beside those of our runs:

    python -m scripts.tables runs=[docs/results] out=docs/results

`runs`: folders in which run directories lie, at any depth. Writes the tables into OUT/README.md, between its lines
"tables start" and "tables end", and a figure for every table with runs. A run counts for an experiment if it has the
same configuration; other runs are listed with the keys that they changed. OUT/memory_plan.json
(scripts.plan_experiments) gives the planned memory.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from omegaconf import DictConfig

from engine import config as configuration
from engine.checkpoint_migrations import FORMAT, SEGMENTATION_ONLY, migrated
from engine.command_line import configured
from scripts import papers
from scripts.compare_runs import Run
from scripts.tables_page import Row, as_markdown, chart

START, END = "<!-- tables start -->", "<!-- tables end -->"


@dataclass
class Tables:
    runs: list[str] = field(default_factory=lambda: ["docs/results"])  # folders that hold run directories
    out: str = "docs/results"  # folder


class Finished(Run):
    """A run that has ended, with its configuration."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.task = "train_seg" if self.scores.best == "miou" else "train_imagenet"
        state = {"format": SEGMENTATION_ONLY if self.task == "train_seg" else FORMAT, "config": self.results["config"]}
        config = cast(dict, migrated(state))["config"]
        self.typed = configuration.from_plain(config, papers.SCHEMAS[self.task], f"{folder}")
        named = re.search(r"experiment=([\w/.-]+)", self.command)
        self.experiment = named[1] if named else None  # that it was started as

    def classes(self) -> list[str]:
        return list(self.results[self.scores.of_classes])


def write(values: DictConfig) -> Path:
    """Write the page; return its path. Raises ValueError for folders without runs, or runs that do not go together."""
    arguments = configuration.typed(values, Tables)
    out = Path(arguments.out)
    page = out / "README.md"
    before, _, rest = (page.read_text() if page.is_file() else f"# Results\n\n{START}\n{END}\n").partition(START)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"out={out}: {page} has no lines {START!r} and {END!r}, between which the tables would go")
    runs, unfinished = found_runs(arguments.runs)
    planned = planned_memory(out / "memory_plan.json")
    tables = {table: rows_of(table, runs, planned) for table in papers.TABLES}
    pictures = {}
    for table, rows in tables.items():
        counted = [run for row in rows for run in [*row.runs, *(run for run, _ in row.others)]]
        if counted:
            pictures[table] = f"table_{table}.png"
            chart(counted).savefig(out / pictures[table], dpi=110)
    text = as_markdown(tables, pictures, unfinished, out)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")
    return page


def found_runs(folders: list[str]) -> tuple[list[Finished], list[Path]]:
    """The runs below folders, and the run directories whose training has not ended."""
    finished: dict[str, Finished] = {}  # by its records, as a page may hold a copy of another page's run
    unfinished = []
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(f"runs: {folder} is not a folder")
        found = sorted(file.parent for file in Path(folder).rglob("config.yaml"))
        if not found:
            raise ValueError(f"runs: there is no run directory (with a config.yaml) below {folder}")
        for path in found:
            if (path / "results.json").is_file():
                run = Finished(path)
                finished.setdefault(run.metrics, run)
            else:
                unfinished.append(path)
    return list(finished.values()), unfinished


def planned_memory(file: Path) -> dict[str, int]:
    """{experiment: bytes on each device} of a record of scripts.plan_experiments; empty without one.

    Raises:
        ValueError: the file is another benchmark's.
    """
    if not file.is_file():
        return {}
    record = json.loads(file.read_text())
    if "scripts.plan_experiments" not in record.get("command", ""):
        raise ValueError(f"{file} is not a record of scripts.plan_experiments: it was made by {record.get('command')}")
    return {row["experiment"]: row["peak"] for row in record["experiments"]}


def rows_of(table: str, runs: list[Finished], planned: dict[str, int]) -> list[Row]:
    """A row for every experiment of a table, with the runs that have its configuration, and those that changed it.

    Raises:
        ValueError: two runs of a row have other classes.
    """
    rows = []
    for name in papers.experiments_of(table):
        own = [run for run in runs if run.task == papers.all_experiments()[name]]
        changes = [(run, papers.changed_keys(run.typed, name)) for run in own]
        counted = [run for run, changed in changes if not changed]
        for run in counted[1:]:
            if run.classes() != counted[0].classes():
                raise ValueError(f"runs: {counted[0].folder} and {run.folder} are both {name}, but of other classes")
        others = [(run, changed) for run, changed in changes if changed and run.experiment == name]
        rows.append(Row(name, counted, others, planned.get(name)))
    return rows


@configured("tables", Tables)
def main(values: DictConfig) -> None:
    print(write(values))


if __name__ == "__main__":
    main()
