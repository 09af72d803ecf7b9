"""SIGKILL, and signals that request a stop: only the current step is lost."""

import signal

import pytest

from engine.process.stopping import EXIT_CODE
from tests.faults import runs
from tests.faults.runs import ENTRIES, Run, killed_after, survived, waiting_after


@pytest.mark.parametrize("entry", ENTRIES)
def test_killed_again_and_again(tmp_path, whole_of, entry):
    for step in (2, 5):
        killed_after(step, tmp_path / "run", entry=entry)
    survived(tmp_path / "run", whole_of(entry), entry=entry)


@pytest.mark.parametrize(
    "entry, number, workers",
    [
        ("train_seg", signal.SIGTERM, 2),
        pytest.param("train_seg", signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param("train_imagenet", signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param("train_imagenet", signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop(tmp_path, whole_of, entry, number, workers):
    run = Run(tmp_path / "run", f"data.workers={workers}", entry=entry, inject=waiting_after(4))
    run.until_step(4).send(number, workers=True)
    (run.run_dir / "go").touch()
    assert run.ends() == EXIT_CODE, run.output
    runs.stopped(run.run_dir, run.output)
    survived(run.run_dir, whole_of(entry), entry=entry)
