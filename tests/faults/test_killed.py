"""SIGKILL, and signals that request a stop: only the current step is lost."""

import os
import signal

import pytest

from engine.process.stopping import EXIT_CODE
from tests.faults import runs
from tests.faults.runs import Run, killed_after, survived, waiting_after
from tests.runs import NARROW_A2

# A loss scale, dropout and two data workers.
FLOAT16 = (*NARROW_A2, "trainer.precision=float16", "trainer.deterministic=true", "data.workers=2")


@pytest.mark.parametrize(
    "entry, options",
    [
        ("train_seg", ()),
        pytest.param("train_seg", FLOAT16, marks=pytest.mark.slow),
        pytest.param("train_imagenet", (), marks=pytest.mark.slow),
    ],
)
def test_killed_again_and_again(tmp_path, whole_of, entry, options):
    for step in (2, 5):
        killed_after(step, tmp_path / "run", *options, entry=entry)
    survived(tmp_path / "run", whole_of(entry, *options), *options, entry=entry)


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


def a_reader_that_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for number in (1, 2):
        os.dup2(writer, number)


def test_nobody_reads_what_is_printed(tmp_path, whole):
    run = Run(tmp_path / "run", inject=a_reader_that_is_gone)
    assert run.ends() == 0
    survived(tmp_path / "run", whole)
