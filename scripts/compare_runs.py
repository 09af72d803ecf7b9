"""Compare runs side by side: `python -m scripts.compare_runs runs=[RUN_DIR,RUN_DIR] out=docs/results/NAME`.

Writes NAME.md (commands, scores, per-class IoU, hardware), NAME.png (curves) and, in NAME/RUN/, the files of each run
that both are made from. Given as `runs`, these folders make the same report again.
"""

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from engine import config as configuration
from engine.command_line import configured


@dataclass
class Comparison:
    runs: list[str] = MISSING  # run directories, or folders that an earlier comparison wrote
    out: str = MISSING  # path of the report, without suffix
    title: str = "Comparison of runs"


class Run:
    """The files of one run, with local folders replaced by DIR."""

    def __init__(self, folder: Path):
        for name in ("results.json", "metrics.jsonl", "config.yaml"):
            if not (folder / name).is_file():
                raise ValueError(f"runs: {folder} has no {name}: expected the directory of a run that has ended")
        self.name = folder.resolve().name
        self.results = json.loads((folder / "results.json").read_text())
        if "miou" not in self.results:
            raise ValueError(f"runs: {folder} has no miou in its results.json: expected a run of train_seg.py")
        header, self.config = (folder / "config.yaml").read_text().split("\n", 1)
        self.command = _without_folders(header.removeprefix("# "))
        self.config = re.sub(r"(?m)^(run_dir|  root): (?!null).*$", r"\1: DIR", self.config)
        self.results["config"]["run_dir"] = "DIR"
        self.results["config"]["data"]["root"] = self.results["config"]["data"]["root"] and "DIR"
        self.results["checkpoint"] = f"DIR/checkpoints/{Path(self.results['checkpoint']).name}"
        self.metrics = (folder / "metrics.jsonl").read_text()
        self.records = [json.loads(line) for line in self.metrics.splitlines()]
        if self.records[-1].get("miou") != self.results["miou"]:
            raise ValueError(
                f"runs: the last record of {folder} is not the evaluation in its results.json: expected the directory "
                f"of a run that has ended"
            )

    def curve(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key in the "train" or "val" records."""
        chosen = [record for record in self.records if record["kind"] == kind]
        return [record["step"] for record in chosen], [record[key] for record in chosen]

    def speed(self) -> float:
        """Median of the images per second that the training logged."""
        speeds = sorted(self.curve("train", "images_per_second")[1])
        return speeds[len(speeds) // 2]

    def minutes(self) -> float:
        """Training time, without evaluations and checkpoints: images over images per second, summed."""
        steps, speeds = self.curve("train", "images_per_second")
        crops = self.results["config"]["data"]["crops_per_minibatch"]
        done = [0, *steps[:-1]]
        return sum((step - before) * crops / s for before, step, s in zip(done, steps, speeds, strict=True)) / 60

    def peak_memory(self) -> float:
        return max(self.curve("train", "peak_memory_mib")[1])

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self.results) + "\n")
        (folder / "config.yaml").write_text(f"# {self.command}\n{self.config}")
        (folder / "metrics.jsonl").write_text(self.metrics)


def _without_folders(command: str) -> str:
    """A command line with data.root=DIR, and without the arguments that only say where the run was written."""
    words = [word for word in shlex.split(command) if not word.startswith(("run_dir=", "resume="))]
    return shlex.join("data.root=DIR" if word.startswith("data.root=") else word for word in words)


def report(runs: list[Run], title: str, picture: str) -> str:
    """The page in Markdown."""
    heads = ["", *(run.name for run in runs)]
    rows = [
        ["**mIoU %, last checkpoint**", *(f"**{100 * run.results['miou']:.2f}**" for run in runs)],
        ["pixel accuracy %", *(f"{100 * run.results['pixel_accuracy']:.2f}" for run in runs)],
    ]
    for name in runs[0].results["iou"]:
        ious = (run.results["iou"].get(name) for run in runs)
        rows.append([name, *("–" if iou is None else f"{100 * iou:.2f}" for iou in ious)])
    rows.append(["images evaluated", *(str(run.results["images"]) for run in runs)])
    rows.append(["training images / s, median", *(f"{run.speed():.1f}" for run in runs)])
    rows.append(["peak memory of the process, MiB", *(f"{run.peak_memory():,.0f}" for run in runs)])
    rows.append(["training, minutes", *(f"{run.minutes():.1f}" for run in runs)])
    lines = [f"# {title}", "", "```"]
    lines += [run.command for run in runs]
    lines += ["```", "", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * len(runs)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", f"![training loss and validation mIoU over steps]({picture})", ""]
    for run in runs:
        environment = run.results["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        lines.append(f"- {run.name}: {environment['hardware']}; {versions}; commit {environment['commit']}")
    return "\n".join(lines) + "\n"


def curves(runs: list[Run]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = (("train", "loss", "training loss"), ("val", "miou", "validation mIoU"))
    for axes, (kind, key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for run in runs:
            axes.plot(*run.curve(kind, key), label=run.name, marker="o" if kind == "val" else "", markersize=3)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def compare(values: DictConfig) -> Path:
    """Write the report and return the page's path. Raises ValueError for a folder that is not a finished run."""
    config = configuration.typed(values, Comparison)
    runs = [Run(Path(folder)) for folder in config.runs]
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"runs={config.runs}: expected folders with different names, the titles of the columns")
    out = Path(config.out)
    for run in runs:
        run.write(out / run.name)
    curves(runs).savefig(f"{out}.png", dpi=120)
    page = Path(f"{out}.md")
    page.write_text(report(runs, config.title, os.path.basename(f"{out}.png")))
    return page


@configured("compare_runs", Comparison)
def main(values: DictConfig) -> None:
    print(compare(values))


if __name__ == "__main__":
    main()
