"""Find runs in folders, read those that have ended, group them by configuration, and give the groups titles."""

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets.file_list import printable
from engine.checkpoint import recorded
from engine.configuration import config as configuration
from engine.process.output_files import write_file

_FOLDERS = ("body.weights", "data.root", "init.weights", "sampler.folder")  # keys with paths on one machine

DATE = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(\.\d+)?")
MOST_POINTS = 250  # of a curve in a copy of a run
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
SEED_AND_FOLDERS = ("run_dir", "resume", "seed", "data.fold")  # keys in which runs of one configuration differ
MEASURED = ("data.mean", "data.std")  # keys that follow from the images of a run, unless they are given
CUDA_KEYS = ("trainer.tf32", "trainer.capture")  # keys without effect on a CPU


TITLES = {
    **{"miou": "mIoU", "pixel_accuracy": "pixel accuracy", "iou": "IoU"},
    **{"top1": "top-1", "top5": "top-5", "accuracy": "accuracy"},
}


class Run:
    """The files of a run that has ended, with local folders replaced by DIR.

    Attributes:
        is_copy: whether a comparison wrote the files.
        schema: its class of keys, which knows its task.
        training: its speed, minutes and peak memory, from its metrics, which are then `thinned`; empty if it ended
            before trainer.log_every_steps.
        typed: its configuration.
        experiment: the one that it was started from, if any.
        classes: their names.
        fold: its data.fold; None without one.
        keys: the configuration's keys without `SEED_AND_FOLDERS`, paths, devices and, on a CPU, `CUDA_KEYS`; the
            processes; whether it is of a fold, and then without `MEASURED` ones, otherwise the images evaluated: folds
            have different numbers.
        evaluations: the results of eval.py with other options, by the end of their files' names.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = folder.resolve().name
        self.results = _content(folder / "results.json")
        self.is_copy = self.results["config"]["run_dir"] == "DIR"
        schemas = [schema for schema in configuration.RUNS.values() if schema.score in self.results]
        if not schemas:
            raise ValueError("it has neither miou nor top1 in its results.json: expected a run of this project")
        self.schema = schemas[0]
        self.classes = list(self.results[self.schema.class_score])
        header, self.config = (folder / "config.yaml").read_text("utf-8").split("\n", 1)
        self.command = _without_folders(header.removeprefix("# "))
        match = re.search(r"experiment=([\w/.-]+)", self.command)
        self.experiment = match[1] if match else None
        self.processes = int(self.config.split()[1])  # "# 2 x cpu"
        self.config = re.sub(r"(?m)^(run_dir|  root|  weights|  folder): (?!null).*$", r"\1: DIR", self.config)
        _hide_folders(self.results)
        self.evaluations = {
            path.stem.removeprefix("results_"): _hide_folders(_content(path))
            for path in sorted(folder.glob("results_*.json"))
        }
        self.records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        # If it was evaluated again on another device or in other minibatches, a few pixels differ.
        if abs(self.records[-1].get(self.schema.score, math.inf) - self.results[self.schema.score]) > 1e-3:
            raise ValueError("its last record is not the evaluation in its results.json, so it has not ended")
        if "training" not in self.results:  # a run's own file, not a copy
            self.results["training"] = self._training_facts()
        self.training = self.results["training"]
        self.records = thinned(self.records, self.schema.score)
        self.typed = recorded.from_plain(self.results["config"], self.schema, f"{folder}")
        self.fold: int | None = getattr(self.typed.data, "fold", None)
        self.keys = self._distinguishing_keys()

    def _distinguishing_keys(self) -> dict[str, Any]:
        """See `keys` above."""
        left_out = [*SEED_AND_FOLDERS]
        images = self.results["images"]
        if self.fold is not None:
            left_out += [key for key in MEASURED if f"{key}=" not in self.command]
            images = "of a fold"
        if self.config.split()[3] == "cpu":
            left_out += CUDA_KEYS
        values = configuration.values_but(self.typed, "per_machine")
        keys = {name: value for name, value in values.items() if name not in left_out}
        return {**keys, "processes": self.processes, "images": images}

    @property
    def metrics(self) -> str:
        """The records, a line of JSON each."""
        return "".join(f"{json.dumps(record)}\n" for record in self.records)

    def launch_command(self) -> str:
        """The command that starts all processes of the run."""
        if self.processes == 1:
            return self.command
        return f"torchrun --nproc-per-node {self.processes} {self.command.removeprefix('python ')}"

    def curve(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key in the "train" or "val" records."""
        kind_records = [record for record in self.records if record["kind"] == kind]
        return [record["step"] for record in kind_records], [record[key] for record in kind_records]

    def _training_facts(self) -> dict[str, float]:
        """Median speed, and minutes without evaluations and checkpoints: images over images per second, summed."""
        steps, speeds = self.curve("train", "images_per_second")
        if not steps:
            return {}
        crops = self.results["config"]["data"]["crops_per_minibatch"]
        pairs = zip(pairwise([0, *steps]), speeds, strict=True)
        seconds = sum((step - previous_step) * crops / speed for (previous_step, step), speed in pairs)
        peak = max(self.curve("train", "peak_memory_mib")[1])
        return {"images_per_second": statistics.median(speeds), "minutes": seconds / 60, "peak_memory_mib": peak}

    def interruptions(self) -> list[int]:
        """The steps after which the run was stopped and continued. (A killed run had taken more steps.)"""
        return [record["step"] for record in self.records if record["kind"] == "resumed"]

    def used_gpu(self) -> bool:
        """Whether the hardware has GPUs (`engine.records.provenance` names them first), and the run used one."""
        return " x " in self.results["environment"]["hardware"] and self.typed.trainer.device != "cpu"

    @cached_property
    def percent(self) -> dict[tuple[str, str], float | None]:
        """{(score, class): percent}; the class is "" for scores of all classes, the value None where there is none."""
        best = self.schema.score
        class_score = self.schema.class_score
        scores = (best, self.schema.second_score)
        shares: dict[tuple[str, str], float | None] = {(TITLES[name], ""): self.results[name] for name in scores}
        for name, results in self.evaluations.items():
            shares[f"{TITLES[best]}, eval.py: {name.replace('_', ', ')}", ""] = results[best]
        shares |= {(TITLES[class_score], name): share for name, share in self.results[class_score].items()}
        return {key: None if share is None else 100 * share for key, share in shares.items()}

    def write(self, folder: Path) -> None:
        files = {"results": self.results, **{f"results_{name}": results for name, results in self.evaluations.items()}}
        for stem, results in files.items():
            write_file(folder / f"{stem}.json", json.dumps(results) + "\n")
        write_file(folder / "config.yaml", f"# {self.command}\n{self.config}")
        write_file(folder / "metrics.jsonl", self.metrics)


def thinned(records: list[dict], best: str) -> list[dict]:
    """The records for curves: at most `MOST_POINTS` of the training, all evaluations, and resumptions."""
    train = [record for record in records if record["kind"] == "train"]
    interval = max(1, -(-len(train) // MOST_POINTS))
    left_out = {record["step"] for number, record in enumerate(train, 1) if number % interval}
    shown_records = [record for record in records if record["kind"] != "train" or record["step"] not in left_out]
    names = ("kind", "step", "loss", best)
    return [{name: _rounded(record[name]) for name in names if name in record} for record in shown_records]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _content(file: Path) -> dict:
    """What a JSON file holds. ValueError names the file."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error


def _hide_folders(results: dict) -> dict:
    """Replace this machine's folders and files in `results` by DIR; returns it."""
    results["config"]["run_dir"] = "DIR"
    for group, name in (key.split(".") for key in _FOLDERS):
        keys = results["config"].get(group, {})
        if keys.get(name) is not None:
            keys[name] = "DIR"
    results["checkpoint"] = f"DIR/checkpoints/{Path(results['checkpoint']).name}"
    return results


def _without_folders(command: str) -> str:
    """A command line with DIR for folders and files, without arguments that say where the run was written."""
    words = [word for word in shlex.split(command) if not word.startswith(("run_dir=", "resume="))]
    words[1:2] = [Path(word).name for word in words[1:2]]  # the entry may have been started from another folder
    keys = (word.partition("=")[0] for word in words)
    return shlex.join(f"{key}=DIR" if key in _FOLDERS else word for key, word in zip(keys, words, strict=True))


def find_runs(folders: Iterable[str | Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs in folders, at any depth, that have ended; and the run directories left out, with the reason.

    Copies that comparisons wrote are used only from folders without other runs.

    ValueError: a folder has no run directory.
    """
    runs: list[Run] = []
    left_out: dict[Path, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"runs: {folder} is not a folder")
        paths = sorted((file.parent for file in folder.rglob("config.yaml")), key=with_numbers)
        if not paths:
            raise ValueError(f"runs: there is no run directory (with a config.yaml) below {folder}")
        runs_or_reasons = {path: _read_run(path) for path in paths}
        left_out |= {path: reason for path, reason in runs_or_reasons.items() if isinstance(reason, str)}
        folder_runs = [run for run in runs_or_reasons.values() if isinstance(run, Run)]
        runs += [run for run in folder_runs if not run.is_copy] or folder_runs
    return runs, left_out


def _read_run(folder: Path) -> Run | str:
    """The run in a run directory, or why it is left out."""
    if not (folder / "results.json").is_file():
        return f"it has not ended{_last_step(folder)}"
    try:
        return Run(folder)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:  # files may hold anything
        reason = " ".join(f"{type(error).__name__}: {error}".replace(f"{folder}", folder.name).split())
        return f"it cannot be read ({printable(reason)})"


def _last_step(folder: Path) -> str:
    """The last recorded step of a run, in brackets; empty if there is none."""
    records = folder / "metrics.jsonl"
    if not records.is_file():
        return ""
    steps = re.findall(r'"step": (\d+)', records.read_text(errors="replace"))
    return f" (step {steps[-1]})" if steps else ""


def with_numbers(path: Path | str) -> list[str | float]:
    """A sort key that puts lr=0.2 before lr=0.05e1, and 9 before 10: alternating texts and numbers."""
    return [float(part) if number % 2 else part for number, part in enumerate(NUMBER.split(str(path)))]


def by_configuration(runs: Iterable[Run]) -> list[list[Run]]:
    """Groups of runs that differ only in seed and fold. A second run with the same of both starts another group."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            is_alike = group[0].keys == run.keys and group[0].schema is run.schema
            if is_alike and all((other.typed.seed, other.fold) != (run.typed.seed, run.fold) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def titles_of(groups: Sequence[list[Run]]) -> list[str]:
    """Titles of groups of runs: folders' names without seed, fold and date, with the folder above if two are equal."""
    names = [_without_seed(group[0].folder.resolve()) for group in groups]
    ends = ["/".join(group[0].folder.resolve().parts[-2:]) for group in groups]
    return [name if names.count(name) == 1 else end for name, end in zip(names, ends, strict=True)]


def _without_seed(folder: Path) -> str:
    """The name of a run's folder without its seed and fold; if nothing is left but a date, that of the folder above."""
    name = re.sub(r"(^|,)(seed|data\.fold)=\d+|(^|[_-])(seed|fold)[_-]?\d+$", "", DATE.sub("", folder.name)).lstrip(",")
    return name or folder.parent.name
