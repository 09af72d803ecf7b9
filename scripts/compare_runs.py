"""Compare runs side by side:

    python -m scripts.compare_runs runs=FOLDER out=OUT
    python -m scripts.compare_runs runs=[RUN_DIR,OTHER_RUN] out=OUT "title=Two norms"
    python -m scripts.compare_runs runs=[FOLDER,docs/results/camvid/norms] out=OUT

`runs` are run directories, or folders that hold some at any depth, all of one task. Runs that differ only in seed and
data.fold share a column: mean ± standard deviation. Columns are named after folders, without seeds, folds and dates.
Writes OUT.md (commands, scores, hardware, runs that have not ended) and OUT.png (curves), and copies the files of each
run that they are made from to OUT/RUN/. Given as `runs`, these folders make the same report again.
"""

import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import color_sequences, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import MISSING

from datasets.file_list import printable
from engine.configuration.command_line import configured
from engine.process.output_files import is_ours, writable_file, write_file
from engine.schema.additions import Plugins
from engine.schema.keys import as_list, key, named_after, quoted
from scripts.reports import charts
from scripts.reports.markdown import conditions, escaped, in_lines, mean_of, table
from scripts.reports.runs import DATE, TITLES, Run, by_configuration, find_runs, titles_of


@dataclass
class Comparison(Plugins):
    runs: Any = key(MISSING, names=True)  # a folder, or a list of folders: run directories, or folders that hold some
    out: str = key(MISSING, written=True)  # path of the report, without suffix
    title: str = "Comparison of runs"  # title of the page


class Group(NamedTuple):
    """Runs of one configuration with different seeds or folds."""

    title: str
    runs: list[Run]

    def training(self, name: str, form: str) -> str:
        """The mean of a training's fact over the runs that have it."""
        values = [run.training[name] for run in self.runs if run.training]
        return format(statistics.mean(values), form) if values else "–"

    def cell(self, score: str, of_class: str = "") -> str:
        """A score, over the runs that have it."""
        percentages = (run.percent.get((score, of_class)) for run in self.runs)
        return mean_of([value for value in percentages if value is not None])


def report(groups: list[Group], left_out: dict[Path, str], title: str, picture: str) -> str:
    """The page: commands, a table of the groups, stopped runs and those left out, the `picture`, and the hardware."""
    runs = [run for group in groups for run in group.runs]
    folders = ",".join(quoted(f"OUT/{named_after([run.name])}") for run in runs)  # names of sweeps have = and commas
    argument = shlex.quote(f"runs=[{folders}]") if '"' in folders else f"runs=[{folders}]"
    command = f'python -m scripts.compare_runs {argument} out=OUT "title={title}"'
    lines = [f"# {title}", "", "```", *map(printable, [*(run.launch_command() for run in runs), command]), "```", ""]
    varied_rows = rows_of_repetitions(groups)
    rows = [*score_rows(groups), *varied_rows, *rows_of_training(groups)]
    lines.append(table(["", *(escaped(group.title) for group in groups)], rows))
    if len(runs) > len(groups):
        lines += ["", f"Means ± standard deviations over {' and '.join(noun for noun, *_ in varied_rows)}."]
    stopped_runs = [run for run in runs if run.interruptions()]
    if stopped_runs:
        lines += ["", "Stopped and continued:"]
    for run in stopped_runs:
        steps = "; ".join(f"{step:,}" for step in run.interruptions())
        lines.append(f"- {escaped(run.name)}, after steps {steps}")
    if left_out:
        lines += ["", "Not in the table:"]
    for path, why in left_out.items():
        end = "/".join(path.resolve().parts[-2:])
        lines.append(f"- {escaped(end)}: {escaped(why)}")
    lines += ["", f"![curves of the runs]({picture})", ""]
    lines += environments(runs)
    return in_lines("\n".join(lines)) + "\n"


def rows_of_repetitions(groups: list[Group]) -> list[list[str]]:
    """Rows of the groups' folds and seeds, each if a group has several."""
    rows = []
    for noun, attribute in (("folds", attrgetter("fold")), ("seeds", attrgetter("typed.seed"))):
        texts = [", ".join(dict.fromkeys(str(attribute(run)) for run in group.runs)) for group in groups]
        if any("," in text for text in texts):
            rows.append([noun, *("–" if text == "None" else f"{1 + text.count(',')} ({text})" for text in texts)])
    return rows


def rows_of_training(groups: list[Group]) -> list[list[str]]:
    """Rows of images, speed, memory and time."""
    image_counts = [sorted({run.results["images"] for run in group.runs}) for group in groups]
    return [
        ["images evaluated", *(" – ".join(dict.fromkeys((str(c[0]), str(c[-1])))) for c in image_counts)],
        ["training images / s, median", *(group.training("images_per_second", ".1f") for group in groups)],
        ["peak memory, MiB (CUDA: of tensors)", *(group.training("peak_memory_mib", ",.0f") for group in groups)],
        ["training, minutes", *(group.training("minutes", ".1f") for group in groups)],
    ]


def score_rows(groups: list[Group]) -> list[list[str]]:
    """Rows of the scores that all runs have, the best first, and of all classes."""
    runs = [run for group in groups for run in group.runs]
    best = TITLES[runs[0].schema.score]
    rows = [[f"**{best} %, last checkpoint**", *(f"**{group.cell(best)}**" for group in groups)]]
    scores = (score for run in runs for score, percentage in run.percent.items() if percentage is not None)
    for score, of_class in dict.fromkeys(scores):
        in_all = all((score, of_class) in run.percent for run in runs)
        if score != best and (in_all or of_class):
            score_name, _, view = score.partition(", ")
            name = escaped(of_class) or f"{score_name} %" + (f", {view}" if view else "")
            rows.append([name, *(group.cell(score, of_class) for group in groups)])
    return rows


def environments(runs: list[Run]) -> list[str]:
    """Hardware and versions, once for all runs with the same."""
    names_by_environment: dict[str, list[str]] = {}
    for run in runs:
        names_by_environment.setdefault(conditions(run.results["environment"]), []).append(escaped(run.name))
    if len(names_by_environment) == 1:
        (environment,) = names_by_environment
        return [f"{'All runs' if len(runs) > 1 else escaped(runs[0].name)}: {environment}."]
    return [f"- {', '.join(names)}: {environment}" for environment, names in names_by_environment.items()]


@rc_context(charts.TEXTS)
def curves(groups: list[Group]) -> Figure:
    """The loss of each run, in the colour of its group; and its scores over the steps.

    If a run has fewer than three evaluations, none has a curve of scores: the last of each is drawn over the minutes,
    or, of a single run, left to the table.
    """
    score = groups[0].runs[0].schema.score
    runs = [(run, colour) for group, colour in zip(groups, colours(groups), strict=False) for run in group.runs]
    over_steps = all(len(run.curve("val", score)[0]) > 2 for run, _ in runs)
    has_scores = over_steps or len(runs) > 1
    figure, (loss_axes, *score_panels) = charts.panels(1, 1 + has_scores, (5 + 5 * has_scores, 3.6))
    lines = {id(run): loss_axes.plot(*run.curve("train", "loss"), color=colour)[0] for run, colour in runs}
    for group in groups:
        lines[id(group.runs[-1])].set_label(printable(group.title))
    loss_axes.set(xlabel="step", ylabel="training loss")
    for axes in score_panels:
        draw_scores(axes, runs, score, over_steps)
    for axes in figure.axes:
        axes.locator_params(axis="x", nbins=6)  # room for steps of five digits
    charts.legend(figure, columns=3)
    return figure


def draw_scores(axes: Axes, runs: list[tuple[Run, Any]], score: str, over_steps: bool) -> None:
    """Draw a score of runs, each with its colour: all evaluations over the steps, or the last over the minutes."""
    for run, colour in runs:
        steps, values = run.curve("val", score)
        percent = 100 * np.array(values, float)
        if over_steps:
            axes.plot(steps, percent, "o-", color=colour, markersize=4)
        elif steps and run.training:
            axes.plot(run.training["minutes"], percent[-1], "o", color=colour, markersize=6)
    low, high = axes.get_ylim()
    middle = statistics.mean((low, high))
    axes.set_ylim(min(low, middle - 2), max(high, middle + 2))  # noise is no gap
    axes.set(xlabel="step" if over_steps else "training, minutes", ylabel=f"validation {TITLES[score]} %")


def colours(groups: list[Group]) -> Iterable[Any]:
    """A colour for each group: its method's, if every group has another method, else one of a palette."""
    method_colours = [charts.METHOD_COLOURS.get(method_of(group.runs[0])) for group in groups]
    if None not in method_colours and len({*method_colours}) == len(groups):
        return method_colours
    return cycle(color_sequences["tab10" if len(groups) <= 10 else "tab20"])


def method_of(run: Run) -> str:
    """How a run saves activations: a norm's name, `recomputed`, or blocks or sqrt of activation checkpointing."""
    recompute = run.typed.trainer.recompute
    return {"none": run.typed.norm.name, "activations": "recomputed", "budget": "recomputed"}.get(recompute, recompute)


def named_groups(folders: list[str]) -> tuple[list[Group], dict[Path, str]]:
    """Groups of the runs in folders, all with different names; and the runs that are left out, with the reason.

    ValueError: no run has ended, they are of several tasks, or two would have the same name.
    """
    runs, left_out = find_runs(folders)
    check_comparable(folders, runs, left_out)
    by_keys = by_configuration(runs)
    groups = [Group(title, members) for title, members in zip(titles_of(by_keys), by_keys, strict=True)]
    has_telling_names = not any(DATE.fullmatch(run.name) for run in runs)
    if not has_telling_names or len({run.name for run in runs}) < len(runs):
        name_after_groups(groups)
    if len({named_after([run.name]) for run in runs}) < len(runs):
        raise ValueError(f"runs={folders}: expected different runs, in folders of different names")
    return groups, left_out


def check_comparable(folders: list[str], runs: list[Run], left_out: dict[Path, str]) -> None:
    """ValueError unless there are runs in `folders`, all of one task."""
    if not runs:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in left_out.items())
        raise ValueError(f"runs={folders}: no run has ended ({reasons})")
    if len({run.schema for run in runs}) > 1:
        scored = {TITLES[run.schema.score]: run.folder for run in runs}
        actual = " and ".join(f"{folder}, scored by {score}" for score, folder in scored.items())
        raise ValueError(f"runs={folders}: expected runs of one task, found {actual}")


def name_after_groups(groups: list[Group]) -> None:
    """Change the name of every run to its group's title, followed by fold and seed if the group has several runs."""
    for title, runs in groups:
        for run in runs:
            fold = "" if run.fold is None else f", fold={run.fold}"
            run.name = title if len(runs) == 1 else f"{title}{fold}, seed={run.typed.seed}"


def compare(config: Comparison) -> Path:
    """Write the report and return the page's path.

    ValueError: see `named_groups`, or the copies would replace the runs or other files.
    """
    out = Path(config.out)
    groups, left_out = named_groups(as_list(config.runs))
    folders = {(out / named_after([run.name])).resolve(): run for group in groups for run in group.runs}
    check_copies(out, folders)
    page = Path(f"{out}.md")
    picture = Path(f"{out}.png")
    writable_file("out", page, kind="comparison")
    if not page.is_file():  # else the picture beside it is ours, too
        writable_file("out", picture)
    for folder, run in folders.items():
        run.write(folder)
    write_file(page, report(groups, left_out, config.title, picture.name))
    charts.save(curves(groups), picture)
    print(page)
    return page


def check_copies(out: Path, folders: dict[Path, Run]) -> None:
    """ValueError if copies of runs in these folders would replace the runs themselves, or files of others."""
    if any(run.folder.resolve() in folders for run in folders.values() if not run.is_copy):
        raise ValueError(f"out={out}: the copies of the runs would replace the runs: give out={out / 'comparison'}")
    for folder in filter(Path.is_dir, folders):
        if any(folder.iterdir()) and not is_ours(folder / "results.json", "copy of a run"):
            raise ValueError(f"out={out}: {folder} holds no copy of a run, and would be overwritten: give another path")


main = configured("compare_runs", Comparison)(compare)

if __name__ == "__main__":
    main()
