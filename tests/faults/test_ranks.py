"""Two ranks under torchrun: one is lost, stopped or fails, all are asked to stop or killed."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.faults import runs
from tests.faults.runs import ends, says, stopped, survived, torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole_of_two(whole_of) -> Path:
    return whole_of("train_seg", processes=2)


def launched_until(step: int, run_dir: Path, *overrides: str, **options) -> tuple[subprocess.Popen, list[int]]:
    """torchrun after a step of its training, and the pids of its processes, by rank."""
    launched = torchrun(run_dir, *overrides, **options)
    return launched, runs.until_step(run_dir, step, launched)


def test_the_others_stop_with_its_error(tmp_path, whole_of_two):
    launched, ranks = launched_until(3, tmp_path / "run")
    os.kill(ranks[1], signal.SIGKILL)
    output = ends(launched)
    assert launched.returncode != 0
    assert "error: process 0 of the run lost another process" in output, output
    assert "start all of them again with resume=auto" in output, output
    # As the root cause or, if both ranks end in the same second, beside it.
    assert re.search(r"rank      : 1 (?:(?!rank  ).)*SIGKILL", output, re.DOTALL), output
    survived(tmp_path / "run", whole_of_two, processes=2)


def test_torchrun_restarts_a_classification_that_resumes(tmp_path, whole_of):
    entry = "train_imagenet"
    launched, ranks = launched_until(2, tmp_path / "run", options=("--max-restarts", "1"), entry=entry)
    os.kill(ranks[0], signal.SIGKILL)
    output = ends(launched)
    assert launched.returncode == 0, output
    survived(tmp_path / "run", whole_of(entry, processes=2), entry=entry, processes=2)


def test_who_waits_too_long_for_another_ends(tmp_path, whole_of_two, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")  # torchrun's grace period for the stopped rank
    launched, ranks = launched_until(3, tmp_path / "run", "trainer.timeout_seconds=60")
    os.kill(ranks[1], signal.SIGSTOP)
    output = ends(launched)
    assert launched.returncode != 0
    lost = "process 0 of the run lost another process, or waited for it longer than trainer.timeout_seconds=60"
    assert says(output, lost)
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_asked_to_stop(tmp_path, whole_of_two, number):
    """Each rank has two data workers. tests/faults/test_slurm.py sends SIGUSR1."""
    launched, _ = launched_until(2, tmp_path / "run", "data.workers=2")
    launched.send_signal(number)
    output = ends(launched)
    assert launched.returncode == 1  # torchrun does not pass on its processes' exit status 75
    stopped(tmp_path / "run", output)
    survived(tmp_path / "run", whole_of_two, processes=2)
