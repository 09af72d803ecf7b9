"""SIGKILL, and signals that request a stop: only the current step is lost."""

import signal

import pytest

from engine.checkpoint import files as checkpoint
from engine.process.stopping import EXIT_CODE
from tests.faults import runs
from tests.faults.runs import OPTIONS, Run, killed_after, says, survived, waiting_after

# make test interrupts a run in tests/test_train_seg.py, and kills saves with the files.
pytestmark = pytest.mark.slow("kills processes")


@pytest.mark.parametrize("entry", OPTIONS)
def test_killed_again_and_again_with_a_damaged_checkpoint(tmp_path, whole_of, entry):
    """The checkpoint before it is then used. tests/engine/checkpoint has all kinds of damage."""
    killed_after(2, tmp_path / "run", entry=entry)
    run = killed_after(5, tmp_path / "run", entry=entry)
    previous, content = run.last.with_name("previous.pt"), run.last.read_bytes()
    run.last.write_bytes(content[: len(content) // 2])
    step = checkpoint.load(previous)["step"]
    output = survived(tmp_path / "run", whole_of(entry), entry=entry)
    assert says(output, f"checkpoint {run.last} is ", f"The run continues from {previous}, of step {step}")


@pytest.mark.parametrize(
    "entry, number, workers", [("train_seg", signal.SIGHUP, 2), ("train_imagenet", signal.SIGINT, 0)]
)
def test_asked_to_stop(tmp_path, whole_of, entry, number, workers):
    run = Run(tmp_path / "run", f"data.workers={workers}", entry=entry, inject=waiting_after(4))
    run.until_step(4).send(number, workers=True)
    (run.run_dir / "go").touch()
    assert run.ends() == EXIT_CODE, run.output
    runs.stopped(run.run_dir, run.output)
    survived(run.run_dir, whole_of(entry), entry=entry)
