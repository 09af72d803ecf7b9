"""Compare runs side by side:

    python -m scripts.compare_runs runs=[RUN_DIR,RUN_DIR] out=docs/results/NAME
    python -m scripts.compare_runs runs=[runs/std,runs/inplace] out=FILE title="Two norms"
    python -m scripts.compare_runs runs=[docs/results/NAME/RUN,RUN_DIR] out=FILE

Writes NAME.md (commands, scores, also per class and of other evaluations, hardware), NAME.png (curves) and, in
NAME/RUN/, the files of each run that both are made from. Given as `runs`, these folders make the same report again. All
runs have the same task.
"""

import json
import os
import re
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.output_files import write_figure, write_file
from scripts.evidence import charts
from scripts.evidence.frame import conditions, table


@dataclass
class Comparison:
    runs: list[str] = MISSING  # run directories, or folders that an earlier comparison wrote
    out: str = MISSING  # path of the report, without suffix
    title: str = "Comparison of runs"  # of the page


class Scores(NamedTuple):
    """The names of a task's scores in results.json, and their titles."""

    best: str
    best_title: str
    second: str
    second_title: str
    of_classes: str


SCORES = (
    Scores("miou", "mIoU %", "pixel_accuracy", "pixel accuracy %", "iou"),
    Scores("top1", "top-1 %", "top5", "top-5 %", "accuracy"),
)


class Run:
    """The files of one run, with local folders replaced by DIR."""

    def __init__(self, folder: Path, title: str | None = None):
        for name in ("results.json", "metrics.jsonl", "config.yaml"):
            if not (folder / name).is_file():
                raise ValueError(f"runs: {folder} has no {name}: expected the directory of a run that has ended")
        self.name = title or folder.resolve().name
        self.results = json.loads((folder / "results.json").read_text())
        known = [scores for scores in SCORES if scores.best in self.results]
        if not known:
            names = " or ".join(scores.best for scores in SCORES)
            raise ValueError(f"runs: {folder} has no {names} in its results.json: expected a run of this project")
        (self.scores,) = known
        header, self.config = (folder / "config.yaml").read_text().split("\n", 1)
        self.command = _without_folders(header.removeprefix("# "))
        processes = re.search(r"(?m)^# (\d+) x \w+$", self.config)
        self.processes = int(processes[1]) if processes else None  # None: of an older version
        self.config = re.sub(r"(?m)^(run_dir|  root): (?!null).*$", r"\1: DIR", self.config)
        _hide_folders(self.results)
        self.others = {
            path.stem.removeprefix("results_"): _hide_folders(json.loads(path.read_text()))
            for path in sorted(folder.glob("results_*.json"))
        }
        self.metrics = (folder / "metrics.jsonl").read_text()
        self.records = [json.loads(line) for line in self.metrics.splitlines()]
        if self.records[-1].get(self.scores.best) != self.results[self.scores.best]:
            raise ValueError(
                f"runs: the last record of {folder} is not the evaluation in its results.json: expected the directory "
                f"of a run that has ended"
            )

    def launched(self) -> str:
        """The command that starts all of its processes."""
        if self.processes in (None, 1):
            return self.command
        return f"torchrun --nproc-per-node {self.processes} {self.command.removeprefix('python ')}"

    def curve(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key in the "train" or "val" records."""
        chosen = [record for record in self.records if record["kind"] == kind]
        return [record["step"] for record in chosen], [record[key] for record in chosen]

    def speed(self) -> float:
        """Median of the images per second that the training logged."""
        return statistics.median(self.curve("train", "images_per_second")[1])

    def minutes(self) -> float:
        """Training time, without evaluations and checkpoints: images over images per second, summed."""
        steps, speeds = self.curve("train", "images_per_second")
        crops = self.results["config"]["data"]["crops_per_minibatch"]
        done = [0, *steps[:-1]]
        return sum((step - before) * crops / s for before, step, s in zip(done, steps, speeds, strict=True)) / 60

    def peak_memory(self) -> float:
        return max(self.curve("train", "peak_memory_mib")[1])

    def write(self, folder: Path) -> None:
        files = {"results": self.results, **{f"results_{name}": results for name, results in self.others.items()}}
        for stem, results in files.items():
            write_file(folder / f"{stem}.json", json.dumps(results) + "\n")
        write_file(folder / "config.yaml", f"# {self.command}\n{self.config}")
        write_file(folder / "metrics.jsonl", self.metrics)


def _hide_folders(results: dict) -> dict:
    """Replace this machine's folders in `results` by DIR; returns it."""
    results["config"]["run_dir"] = "DIR"
    results["config"]["data"]["root"] = results["config"]["data"]["root"] and "DIR"
    results["checkpoint"] = f"DIR/checkpoints/{Path(results['checkpoint']).name}"
    return results


def _without_folders(command: str) -> str:
    """A command line with data.root=DIR, and without the arguments that only say where the run was written."""
    words = [word for word in shlex.split(command) if not word.startswith(("run_dir=", "resume="))]
    return shlex.join("data.root=DIR" if word.startswith("data.root=") else word for word in words)


def report(runs: list[Run], title: str, picture: str) -> str:
    scores = runs[0].scores
    rows = [
        [f"**{scores.best_title}, last checkpoint**", *(f"**{_percent(run.results[scores.best])}**" for run in runs)],
        [scores.second_title, *(_percent(run.results[scores.second]) for run in runs)],
    ]
    for name in runs[0].others:
        if all(name in run.others for run in runs):
            about = f"{scores.best_title}, eval.py: {name.replace('_', ', ')}"
            rows.append([about, *(_percent(run.others[name][scores.best]) for run in runs)])
    for name in runs[0].results[scores.of_classes]:
        rows.append([name, *(_percent(run.results[scores.of_classes].get(name)) for run in runs)])
    rows += [
        ["images evaluated", *(str(run.results["images"]) for run in runs)],
        ["training images / s, median", *(f"{run.speed():.1f}" for run in runs)],
        ["peak memory of the process, MiB", *(f"{run.peak_memory():,.0f}" for run in runs)],
        ["training, minutes", *(f"{run.minutes():.1f}" for run in runs)],
    ]
    lines = [f"# {title}", "", "```", *(run.launched() for run in runs), "```", ""]
    lines.append(table(["", *(run.name for run in runs)], rows))
    lines += ["", f"![training loss and validation {scores.best_title.removesuffix(' %')} over steps]({picture})", ""]
    lines += [f"- {run.name}: {conditions(run.results['environment'])}" for run in runs]
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def curves(runs: list[Run]) -> Figure:
    scores = runs[0].scores
    figure, panels = charts.panels(1, 2, (10, 3.6))
    best = ("val", scores.best, f"validation {scores.best_title.removesuffix(' %')}", "o-")
    for axes, (kind, key, label, style) in zip(panels, (("train", "loss", "training loss", "-"), best), strict=True):
        shown = []
        for run in runs:
            steps, values = run.curve(kind, key)
            shown.append(charts.Series(run.name, values, steps, style=style))
        charts.lines(axes, shown, xlabel="step", ylabel=label)
    charts.legend(figure, columns=3)
    return figure


def titles(folders: list[Path]) -> list[str]:
    """The names of run directories, or of their parents if all have the same: STD/seed0 and INPLACE/seed0."""
    while len(folders) > 1 and len({folder.name for folder in folders}) == 1 and len(set(folders)) == len(folders):
        folders = [folder.parent for folder in folders]
    return [folder.name for folder in folders]


def compare(values: DictConfig) -> Path:
    """Write the report and return the page's path. Raises ValueError for a folder that is not a finished run."""
    config = configuration.typed(values, Comparison)
    names = titles([Path(folder).resolve() for folder in config.runs])
    runs = [Run(Path(folder), name) for folder, name in zip(config.runs, names, strict=True)]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"runs={config.runs}: expected folders with different names, the titles of the columns")
    if len({run.scores for run in runs}) > 1:
        raise ValueError(f"runs={config.runs}: expected runs of one task")
    out = Path(config.out)
    for run in runs:
        run.write(out / run.name)
    write_figure(Path(f"{out}.png"), curves(runs), dpi=120)
    page = Path(f"{out}.md")
    write_file(page, report(runs, config.title, os.path.basename(f"{out}.png")))
    return page


@configured("compare_runs", Comparison)
def main(values: DictConfig) -> None:
    print(compare(values))


if __name__ == "__main__":
    main()
