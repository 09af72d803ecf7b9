"""Write the papers' tables, with our scores beside the published ones:

    python -m benchmarks.tables runs=RUN_DIR out=OUT
    python -m benchmarks.tables runs=runs/tables out=OUT
    python -m benchmarks.tables runs=[docs/results,runs/tables] out=OUT

`runs`: one or several folders with run directories at any depth. Writes OUT/tables.md. A run counts for an experiment
if it has the same configuration, apart from settings of speed such as precision, which are printed beside its
score; other runs are listed with the keys that they changed. Planned memory is from docs/results/memory_plan.json.
Experiments of a plugin may have tables of their own: plugins=[NAME]. For curves, use scripts.compare_runs.
"""

import itertools
import json
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from benchmarks import frame
from benchmarks.rows import GIB, MIB, section
from engine.configuration.command_line import configured
from engine.process.output_files import write_file
from engine.schema.additions import Plugins
from engine.schema.keys import as_list, key
from scripts.reports import papers
from scripts.reports.markdown import escaped, in_lines, mean_of, table
from scripts.reports.runs import TITLES, Run, find_runs

LEFT_OUT = "left_out"  # name of the block of run directories that are in no table


@dataclass
class Tables(Plugins):
    runs: Any = key("docs/results", names=True)  # folder that holds run directories, or a list of such folders
    out: str = MISSING  # folder


class Row(NamedTuple):
    """An experiment and its runs."""

    experiment: str
    runs: dict[str, list[Run]]  # with its configuration, one per seed, by the keys in `papers.SPEED` that they changed
    repeats: dict[Path, Run]  # other folders with a seed of these: the run that counts
    variants: list[tuple[Run, list[str]]]  # started from this experiment, with changed keys
    planned: int | None  # bytes on each device


def write(arguments: Tables) -> Path:
    """Write the page; return its path. ValueError: folders have no runs, or runs that do not go together."""
    out = Path(arguments.out)
    page = out / "tables.md"
    titles = papers.titles() | {LEFT_OUT: "In no table"}
    parts = (section(titles[name], text, level=2) for name, text in tables_of(as_list(arguments.runs), out).items())
    write_file(page, "\n\n".join(parts) + "\n")
    print(page)
    return page


@cache
def of_results() -> dict[str, str]:
    """The blocks of docs/results/tables.md."""
    return tables_of([str(frame.RESULTS)], frame.RESULTS)


def tables_of(folders: list[str], out: Path) -> dict[str, str]:
    """{table: its lines}, and the run directories that are in none. Links are relative to the folder `out`."""
    all_runs, left_out = find_runs(folders)
    finished: dict[str, Run] = {}  # by its records, as a page may hold a copy of another page's run
    for run in all_runs:
        finished.setdefault(run.metrics, run)
    runs = list(finished.values())
    planned_calls = json.loads((frame.RESULTS / "memory_plan.json").read_text())["calls"]
    peaks = {row["experiment"]: row["peak"] for call in planned_calls for row in frame.rows_of(call, "experiments")}
    tables = rows_by_table(runs, peaks)
    all_rows = [row for rows in tables.values() for row in rows]
    shown_folders = {run.folder for row in all_rows for run in itertools.chain(*row.runs.values())}
    shown_folders |= {run.folder for row in all_rows for run, _ in row.variants}
    repeats = {path: run for row in all_rows for path, run in row.repeats.items()}
    for run in runs:
        if run.folder in repeats and run.folder not in shown_folders:
            left_out[run.folder] = f"it repeats {_relative(repeats[run.folder].folder, out)}"
        elif run.folder not in shown_folders:
            left_out[run.folder] = "it is of no experiment"
    blocks = {name: as_markdown(name, rows, out) for name, rows in tables.items()}
    lines = (f"- {escaped(_relative(path, out))}: {escaped(reason)}" for path, reason in left_out.items())
    return blocks | {LEFT_OUT: "\n".join(lines)}


def rows_by_table(runs: list[Run], planned: dict[str, int]) -> dict[str, list[Row]]:
    """The rows of each table, one per experiment.

    A row has the runs with its configuration. If several have the same seed, one counts: a run started from the row's
    experiment rather than from another that is the same training, from the folder with most runs of the row. A run with
    another configuration is listed under the experiment that it was started from, with the keys that differ.

    ValueError: two runs of a row have other classes.
    """
    names = {table: papers.experiments_of(table) for table in papers.titles()}
    changes = {
        (name, run.folder): papers.changed_keys(run.typed, name, run.processes)
        for name in itertools.chain(*names.values())
        for run in runs
        if run.schema.entry == papers.all_experiments()[name]
    }
    in_rows = {folder for (_, folder), changed in changes.items() if not changed}

    def row(name: str) -> Row:
        counted_runs = [run for run in runs if changes.get((name, run.folder)) == []]
        for run in counted_runs[1:]:
            if run.classes != counted_runs[0].classes:
                folders = f"{counted_runs[0].folder} and {run.folder}"
                raise ValueError(f"runs: {folders} are both {name}, but of other classes")
        variants = [run for run in runs if run.experiment == name and run.folder not in in_rows]
        changed = [(run, changes[name, run.folder]) for run in variants]
        siblings = Counter(run.folder.parent for run in counted_runs)
        by_speed: dict[str, list[Run]] = {}
        repeats: dict[Path, Run] = {}
        for run in sorted(counted_runs, key=lambda run: (run.experiment != name, -siblings[run.folder.parent])):
            differing = papers.differing_keys(run.typed, name).items()  # keys of SPEED
            speed = (f"{key}={value}" for key, value in differing if key in run.keys)
            rivals = by_speed.setdefault(" ".join(speed), [])
            same_seed = [rival for rival in rivals if rival.typed.seed == run.typed.seed]
            if same_seed:
                repeats[run.folder] = same_seed[0]
            else:
                rivals.append(run)
        return Row(name, by_speed, repeats, changed, planned.get(name))

    return {table: [row(name) for name in experiments] for table, experiments in names.items()}


def as_markdown(name: str, rows: list[Row], out: Path) -> str:
    """A table of the rows that have runs, the other rows in a line, and runs that changed keys."""
    titles = ["experiment", "score", "published", "ours", "difference", "estimated, GiB", "measured, GiB", "run"]
    cells = [line for row in rows if row.runs for line in _cells(row, out)]
    parts = [table(titles, cells, left=2)] if cells else []
    missing = [_missing(row) for row in rows if not row.runs]
    if missing:
        command = f"python -m scripts.run_table table={name} dry_run=true"
        parts.append(f"Not run, with their published scores: {', '.join(missing)}. Their commands: `{command}`.")
    variants = [variant for row in rows for variant in row.variants]
    if variants:
        parts.append("Runs that changed keys of their experiment, and so are not rows of it:")
        lines = []
        for run, changed in variants:
            score = f"{TITLES[run.schema.score]} {100 * run.results[run.schema.score]:.2f}"
            lines.append(f"- {_link(run, out)}, with `{' '.join(changed)}`: {score}")
        parts.append("\n".join(lines))
    return in_lines("\n\n".join(parts))


def _missing(row: Row) -> str:
    """An experiment without runs, with the scores published for its own evaluation."""
    scores = [score for score in papers.published_scores(row.experiment) if not score.evaluation]
    percents = " / ".join(f"{score.percent:.2f}" for score in scores if score.source == scores[0].source)
    return f"`{row.experiment.rpartition('/')[2]}`" + (f" {percents}" if scores else "")


def _cells(row: Row, out: Path) -> Iterator[list[str]]:
    """A line for every published evaluation of the experiment; one for its own score if nothing is published."""
    published = papers.published_scores(row.experiment)
    evaluations = dict.fromkeys((score.evaluation, score.source) for score in published) or {("", ""): None}
    measured_runs = [run for run in row.runs.get("", []) if run.used_gpu()]
    peaks = [f"{run.training['peak_memory_mib'] * MIB / GIB:.2f}" for run in measured_runs]
    for number, (evaluation, source) in enumerate(evaluations):
        scores = [score for score in published if (score.evaluation, score.source) == (evaluation, source)]
        names = [score.score for score in scores] or [papers.SCHEMAS[papers.all_experiments()[row.experiment]].score]
        titles = " / ".join(TITLES.get(name, name) for name in names)
        description = ", ".join(filter(None, (titles, evaluation, source)))
        ours = []
        differences = []
        for speed, runs in row.runs.items():
            values = [_values(runs, evaluation, name) for name in names]
            if all(values):
                ours.append(" / ".join(map(mean_of, values)) + (f", with `{speed}`" if speed else ""))
                pairs = zip(values, scores, strict=False)
                gaps = (statistics.mean(percentages) - score.percent for percentages, score in pairs)
                differences.append(" / ".join(f"{gap:+.2f}" for gap in gaps))
        yield [
            row.experiment if not number else "",
            description,
            " / ".join(f"{score.percent:.2f}" for score in scores) or "–",
            "; ".join(ours) or "not evaluated",
            "; ".join(filter(None, differences)) or "–",
            "–" if row.planned is None or number else f"{row.planned / GIB:.2f}",
            "" if number else ", ".join(peaks) or "–",
            "" if number else ", ".join(_link(run, out) for run in itertools.chain(*row.runs.values())),
        ]


def _values(runs: list[Run], evaluation: str, score: str) -> list[float]:
    """The percentages of the runs that have the evaluation and the score."""
    name = papers.results_of(evaluation, runs[0].typed).removeprefix("results_") if evaluation else ""
    evaluated = (run.evaluations.get(name) if evaluation else run.results for run in runs)
    return [100 * results[score] for results in evaluated if results is not None and score in results]


def _link(run: Run, out: Path) -> str:
    return f"[{escaped(_relative(run.folder, out))}]({_relative(run.folder / 'results.json', out)})"


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


main = configured("tables", Tables)(write)

if __name__ == "__main__":
    main()
