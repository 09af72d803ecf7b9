"""Sweeps by the released launchers and sweepers of Hydra, started elsewhere, without this repository on the path."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
import torch

from engine.process.stopping import EXIT_CODE
from tests.runs import REPOSITORY, SHORT

RUN = (
    *SHORT,
    "data.crops_per_minibatch=4",
    "trainer.epochs=null",
    "trainer.evaluate_every_epochs=null",
    "trainer.steps=3",
    "trainer.pictures=0",
)


def plugin(folder: Path) -> None:
    """The plugin of docs/extending.md."""
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    code = re.search(r"<!-- plugin start -->\n```python\n(.*?)```\n<!-- plugin end -->", page, re.DOTALL)[1]
    (folder / "mine.py").write_text(code)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a sweep in a folder of the user's own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(REPOSITORY / "train_seg.py"), "-m", *RUN, *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def swept(folder: Path, *words: str) -> str:
    """What a sweep prints that ends well."""
    process = start(folder, "run_dir=sweep", *words)
    output, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors
    return output


def wait_until(is_reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a moment of a sweep, which must not end before it."""
    while not is_reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def trains(run_dir: Path) -> Callable[[], bool]:
    """Whether a run has logged a step."""
    log = run_dir / "metrics.jsonl"
    return lambda: log.is_file() and log.stat().st_size > 0


def processes_with(argument: str) -> list[int]:
    """The processes that have an argument."""
    numbers = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument in file.read_text().split("\0"):
                numbers.append(int(file.parent.name))
    return numbers


LONGER = ("trainer.steps=30", "trainer.log_every_steps=1")


@pytest.mark.slow
def test_tasks_of_submitit_are_ranks_that_know_plugins_and_resume_when_they_are_preempted(tmp_path):
    """Slurm signals all tasks. The job is requeued, and its weights equal those of one that nobody stopped."""
    plugin(tmp_path)
    tasks = ("hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=20")
    words = ("plugins=[mine]", "loss=focal", "seed=range(0,1)", *LONGER, *tasks)
    swept(tmp_path, *words)
    undisturbed = tmp_path / "sweep" / "seed=0"
    config = (undisturbed / "config.yaml").read_text()
    assert "\n# 2 x cpu" in config and "name: focal" in config

    process, run_dir = start(tmp_path, "run_dir=preempted", *words), tmp_path / "preempted" / "seed=0"
    wait_until(trains(run_dir), process)
    tasks_of_job = processes_with("submitit.core._submit")
    assert len(tasks_of_job) == 2
    for number in tasks_of_job:
        os.kill(number, signal.SIGUSR2)
    output, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors
    logs = "".join(file.read_text() for file in (tmp_path / "preempted" / ".submitit").rglob("*_0_log.err"))
    assert logs.count("this job is preempted") == 1
    weights = [torch.load(run / "checkpoints" / "last.pt")["network"] for run in (undisturbed, run_dir)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.slow
def test_a_sweep_that_is_preempted_goes_on_with_the_job_that_it_ran(tmp_path):
    """The job saves, no other starts, and the sweep ends with its status."""
    process = start(tmp_path, "run_dir=sweep", "seed=0,1", *LONGER)
    first, second = (tmp_path / "sweep" / f"seed={seed}" for seed in (0, 1))
    wait_until(trains(first), process)
    process.terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == EXIT_CODE, errors
    assert (first / "checkpoints" / "last.pt").is_file() and not second.exists()
    assert "2 succeeded, 0 had already finished, 0 failed" in swept(tmp_path, "seed=0,1", *LONGER)
    steps = [json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(1) == 1


@pytest.mark.slow
def test_jobs_of_joblib_share_a_sweep_with_jobs_in_processes(tmp_path):
    """Both leave runs in the same folders, and skip those of the other."""
    printed = swept(tmp_path, "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert "2 succeeded, 0 had already finished, 0 failed" in printed
    assert {place.name for place in (tmp_path / "sweep").iterdir()} == {"multirun.yaml", "seed=0", "seed=1"}
    assert "1 succeeded, 2 had already finished, 0 failed" in swept(tmp_path, "seed=0,1,2")


@pytest.mark.slow
def test_optuna_looks_for_the_best_score_and_goes_on_after_a_kill(tmp_path):
    """A trial that diverges has failed, and ends nothing. The study has four, and the one that was killed."""
    drawn = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=10")  # 0.02, 1e30, 0.02
    words = ("optim.lr=choice(0.02,1e30)", "hparams_search=optuna", *LONGER, *drawn)
    process = start(tmp_path, "run_dir=sweep", *words, "hydra.sweeper.n_trials=4")
    wait_until(trains(tmp_path / "sweep" / "2"), process)
    process.kill()
    process.communicate()
    swept(tmp_path, *words[:-1], "hydra.sweeper.sampler.seed=2", "hydra.sweeper.n_trials=2")  # 0.02, 0.02
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/sweep/optuna.db")
    ended = [(tmp_path / "sweep" / str(trial.number) / "results.json").is_file() for trial in study.trials]
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "FAIL", "RUNNING", "COMPLETE", "COMPLETE"]
    assert ended == [True, False, False, True, True] and study.direction.name == "MAXIMIZE"
