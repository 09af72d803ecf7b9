"""Sweeps by the released launchers and sweepers of Hydra, started elsewhere, without this repository on the path."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def swept(folder: Path, *words: str) -> str:
    """What a sweep prints that ends well."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(REPOSITORY / "train_seg.py"), "-m", "run_dir=sweep", *RUN, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_tasks_of_submitit_are_ranks_that_know_plugins(tmp_path):
    """The same command in processes skips the run that has ended there."""
    plugin(tmp_path)
    local = ("hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=20")
    swept(tmp_path, "plugins=[mine]", "loss=focal", "seed=range(0,1)", *local)
    config = (tmp_path / "sweep" / "seed=0" / "config.yaml").read_text()
    assert "\n# 2 x cpu" in config and "name: focal" in config
    assert (tmp_path / "sweep" / "seed=0" / "results.json").is_file()


@pytest.mark.slow
def test_jobs_of_joblib_share_a_sweep_with_jobs_in_processes(tmp_path):
    """Both leave runs in the same folders, and skip those of the other."""
    swept(tmp_path, "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert {place.name for place in (tmp_path / "sweep").iterdir()} == {"multirun.yaml", "seed=0", "seed=1"}
    assert "1 succeeded, 2 had already finished, 0 failed" in swept(tmp_path, "seed=0,1,2")


@pytest.mark.slow
def test_optuna_looks_for_the_best_score_and_goes_on(tmp_path):
    """A trial that diverges has failed, and ends nothing."""
    drawn = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.n_trials=2")
    words = ("optim.lr=choice(0.02,1e30)", "hparams_search=optuna", *drawn)
    swept(tmp_path, *words)
    swept(tmp_path, *words[:-1], "hydra.sweeper.n_trials=1")
    ended = [(tmp_path / "sweep" / str(trial) / "results.json").is_file() for trial in range(3)]
    assert ended == [False, True, False] and (tmp_path / "sweep" / "optuna.db").is_file()
