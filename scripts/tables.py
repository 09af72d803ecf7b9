"""Write the papers' tables, with our scores beside the published ones:

    python -m scripts.tables runs=[docs/results] out=docs/results

`runs`: a folder, or several, in which run directories lie, at any depth. Writes the tables into OUT/README.md, between
its lines "tables start" and "tables end", and a figure for every table with runs. A run counts for an experiment if it
has the same configuration; other runs are listed with the keys that they changed. `plan`, a record of
scripts.plan_experiments, gives the planned memory.
"""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from engine import config as configuration
from engine.checkpoint_migrations import FORMAT, SEGMENTATION_ONLY, migrated
from engine.command_line import configured
from scripts import papers
from scripts.compare_runs import Run
from scripts.tables_page import Row, as_markdown, chart, runs_of

START, END = "<!-- tables start -->", "<!-- tables end -->"


@dataclass
class Tables:
    runs: Any = "docs/results"  # folder that holds run directories, or a list of such folders
    out: str = "docs/results"  # folder
    plan: str = "docs/results/memory_plan.json"  # record of scripts.plan_experiments


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
    runs, left_out = found_runs([arguments.runs] if isinstance(arguments.runs, str) else arguments.runs)
    planned = planned_memory(Path(arguments.plan))
    tables = rows_of(runs, planned)
    shown = {run.folder for rows in tables.values() for run in runs_of(rows)}
    left_out |= {run.folder: "it is of no experiment" for run in runs if run.folder not in shown}
    out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for table, rows in tables.items():
        if counted := runs_of(rows):
            pictures[table] = f"table_{table}.png"
            chart(counted).savefig(out / pictures[table], dpi=110)
    text = as_markdown(tables, pictures, left_out, out)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")
    return page


def found_runs(folders: list[str]) -> tuple[list[Finished], dict[Path, str]]:
    """The runs below folders, and run directories that cannot be read, with the reason."""
    finished: dict[str, Finished] = {}  # by its records, as a page may hold a copy of another page's run
    left_out = {}
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(f"runs: {folder} is not a folder")
        found = sorted(file.parent for file in Path(folder).rglob("config.yaml"))
        if not found:
            raise ValueError(f"runs: there is no run directory (with a config.yaml) below {folder}")
        for path in found:
            if not (path / "results.json").is_file():
                left_out[path] = "it has not ended"
                continue
            try:
                run = Finished(path)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                left_out[path] = f"it cannot be read ({type(error).__name__}: {error})".replace(f"{path}", path.name)
            else:
                finished.setdefault(run.metrics, run)
    return list(finished.values()), left_out


def planned_memory(file: Path) -> dict[str, int]:
    """{experiment: bytes on each device} of a record of scripts.plan_experiments; empty without one.

    Raises:
        ValueError: the file is another benchmark's, or damaged.
    """
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text())
        if "scripts.plan_experiments" not in record["command"]:
            raise ValueError(f"it was made by {record['command']}")
        return {row["experiment"]: row["peak"] for row in record["experiments"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"plan={file} is not a record of scripts.plan_experiments: {error}") from error


def rows_of(runs: list[Finished], planned: dict[str, int]) -> dict[str, list[Row]]:
    """The rows of each table, one per experiment.

    A row has the runs with its configuration. A run that is in no row is listed with the experiment that it was started
    as, and with the keys that differ.

    Raises:
        ValueError: two runs of a row have other classes.
    """
    names = {table: papers.experiments_of(table) for table in papers.TABLES}
    changes = {
        (name, run.folder): papers.changed_keys(run.typed, name, run.processes)
        for name in itertools.chain(*names.values())
        for run in runs
        if run.task == papers.all_experiments()[name]
    }
    in_rows = {folder for (_, folder), changed in changes.items() if not changed}

    def row(name: str) -> Row:
        counted = [run for run in runs if changes.get((name, run.folder)) == []]
        for run in counted[1:]:
            if run.classes() != counted[0].classes():
                raise ValueError(f"runs: {counted[0].folder} and {run.folder} are both {name}, but of other classes")
        others = [run for run in runs if run.experiment == name and run.folder not in in_rows]
        changed = [(run, changes[name, run.folder]) for run in others]
        return Row(name, counted, changed, planned.get(name))

    return {table: [row(name) for name in own] for table, own in names.items()}


@configured("tables", Tables)
def main(values: DictConfig) -> None:
    print(write(values))


if __name__ == "__main__":
    main()
