"""Run the same short commands in two checkouts of this project, and list every result that differs by a bit:

    python -m scripts.evidence.compare_checkouts old=DIR new=DIR camvid=DIR out=FILE.md
    python -m scripts.evidence.compare_checkouts old=DIR new=DIR camvid=DIR out=FILE.md work=DIR jobs=2
    python -m scripts.evidence.compare_checkouts old=DIR new=DIR camvid=DIR out=FILE.md only=[NAME]

Run it before and after a restructuring, to prove that trainings, evaluations and predictions have not changed.
Everything runs on the CPU and takes about four minutes per checkout on two cores. `camvid` is that dataset's folder,
`only` chooses scenarios, and `jobs` of them run at a time. `work` keeps the results: the next comparison on the same
machine reuses them for a checkout without uncommitted changes. Exit status 1: something differs.

Not compared: times, memory, hardware and versions, the console, log.txt, the order of keys.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.output_files import write_file
from scripts.evidence.compare_checkouts.checkout import CommandFailed, Side
from scripts.evidence.compare_checkouts.scenarios import SCENARIOS
from scripts.evidence.compare_checkouts.values import COLUMNS, Column, compare_folders
from scripts.reports.markdown import table

SHOWN = 5  # differences per scenario and column

Compared = dict[str, Column]  # of `compare_folders`, for one scenario


@dataclass
class CheckoutComparison:
    old: str = MISSING  # a checkout of this project
    new: str = MISSING  # another checkout
    camvid: str = MISSING  # folder of the dataset
    out: str = MISSING  # Markdown file
    only: list[str] = field(default_factory=list)  # names of scenarios; empty: all
    work: str | None = None  # where results are kept; null: a temporary folder
    jobs: int = 2  # scenarios at a time


def compare_scenario(scenario: str, old: Side, new: Side) -> Compared:
    """Run a scenario in both checkouts and compare the results; a command that fails counts as one difference."""
    folders = []
    for side in (old, new):
        try:
            folders.append(side.results(scenario, old))
        except CommandFailed as failed:
            nothing = {column: Column(0, []) for column in COLUMNS}
            return nothing | {"files": Column(1, [f"{side.name} failed: {failed}"])}
    return compare_folders(*folders)


def page(compared: dict[str, Compared], old: str, new: str) -> str:
    """The report in Markdown; its last line is the total."""
    rows = ([scenario, *(_cell(columns[column]) for column in COLUMNS)] for scenario, columns in compared.items())
    lines = [f"# {old} and {new}", "", table(["", *COLUMNS], rows, left=1 + len(COLUMNS))]
    for scenario, columns in compared.items():
        for column, (_, different) in columns.items():
            if different:
                lines += ["", f"{scenario}, {column}, old → new:", *(f"- {line}" for line in different[:SHOWN])]
            if len(different) > SHOWN:
                lines.append(f"- and {len(different) - SHOWN} more")
    count, differ = total(compared)
    end = f"{differ:,} of {count:,} values differ." if differ else f"All {count:,} values are equal to the bit."
    return "\n".join([*lines, "", end]) + "\n"


def _cell(column: Column) -> str:
    count, different = column
    if different:
        return f"**{len(different)} of {count} differ**: {different[0].partition(': ')[0]}"
    return f"{count} equal" if count else "–"


def total(compared: dict[str, Compared]) -> tuple[int, int]:
    """How many values were compared, and how many differ."""
    cells = [cell for columns in compared.values() for cell in columns.values()]
    return sum(cell.total for cell in cells), sum(len(cell.different) for cell in cells)


def compare(values: DictConfig) -> bool:
    """Compare as configured, write and print the report, and return whether everything is equal."""
    config = configuration.typed(values, CheckoutComparison)
    if unknown := set(config.only) - SCENARIOS.keys():
        raise ValueError(f"only={sorted(unknown)[0]}: expected some of {', '.join(SCENARIOS)}")
    camvid = Path(config.camvid).resolve()
    if not camvid.is_dir():
        raise ValueError(f"camvid={camvid} is not a folder: expected the folder of CamVid, see docs/data.md")
    keep = tempfile.TemporaryDirectory() if config.work is None else nullcontext(config.work)
    with keep as work, ThreadPoolExecutor(config.jobs) as pool:
        old, new = (Side(name, getattr(config, name), camvid, Path(work).resolve()) for name in ("old", "new"))
        chosen = config.only or list(SCENARIOS)
        compared: dict[str, Compared] = {}
        results = pool.map(partial(compare_scenario, old=old, new=new), chosen)
        for scenario, columns in zip(chosen, results, strict=True):
            compared[scenario] = columns
            print("{}: {:,} values, {:,} differ".format(scenario, *total({scenario: columns})), flush=True)
    report = page(compared, old.version, new.version)
    out = Path(config.out)
    write_file(out, report)
    print(report, end="")
    return total(compared)[1] == 0


@configured("compare_checkouts", CheckoutComparison)
def main(values: DictConfig) -> None:
    sys.exit(not compare(values))


if __name__ == "__main__":
    main()
