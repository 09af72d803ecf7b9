"""Truncated checkpoints, full disks, and two runs in one folder."""

import resource
from pathlib import Path

import pytest

from engine.checkpoint import files as checkpoint
from tests.faults.runs import ENTRIES, Run, before_call, killed_after, says, survived, waiting_after


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_truncated_checkpoint_is_named_and_the_previous_one_used(tmp_path, whole_of, entry):
    run = killed_after(5, tmp_path / "run", entry=entry)
    previous = run.last.with_name("previous.pt")
    content = run.last.read_bytes()
    run.last.write_bytes(content[: len(content) // 2])
    step = checkpoint.load(previous)["step"]
    output = survived(run.run_dir, whole_of(entry), entry=entry)
    assert says(output, f"checkpoint {run.last} is ", f"The run continues from {previous}, of step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["train_seg", "train_imagenet"])
def test_the_second_of_two_runs_names_the_first(tmp_path, whole_of, entry):
    first = Run(tmp_path / "run", entry=entry, inject=waiting_after(2)).until_step(2)
    second = Run(tmp_path / "run", entry=entry)
    second.until(lambda: "waiting for it to end" in second.output)
    assert says(second.output, f"another process (process {first.process.pid} on ")
    first.killed()
    assert second.ends() == 0
    survived(tmp_path / "run", whole_of(entry), entry=entry)


def files_of_half_a_checkpoint(last: Path, *_) -> None:
    """A write of more fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (last.stat().st_size // 2, resource.RLIM_INFINITY))


def full_from_the_fourth_checkpoint() -> None:
    before_call(checkpoint, "save", 4, files_of_half_a_checkpoint)


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_room_for_a_checkpoint(tmp_path, whole_of, entry):
    run = Run(tmp_path / "run", entry=entry, inject=full_from_the_fourth_checkpoint)
    output = run.fails(f"error: checkpoint {run.last} of step 4 cannot be written: File too large")
    assert f"the last good checkpoint is kept: {run.last}, of step 3. Make room" in output
    survived(tmp_path / "run", whole_of(entry), entry=entry)
