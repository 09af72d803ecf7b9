"""Damaged checkpoints and full disks."""

import os
import random
import resource
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest
import torch

from engine import checkpoint
from engine.metrics_logger import MetricsLogger
from tests.faults.runs import Run, says, survived


def truncate(content: bytes, at: float) -> bytes:
    return content[: int(at * len(content))]


def zeros_to_the_end(content: bytes, at: float) -> bytes:
    return truncate(content, at).ljust(len(content), b"\0")


def flip(content: bytes, at: float) -> bytes:
    place = int(at * len(content))
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


DAMAGES = [
    pytest.param(damage, id=name, marks=[pytest.mark.injects("damaged checkpoint", f"last.pt {words}"), *marks])
    for damage, name, words, marks in (
        (truncate, "truncated", "loses its end, from a random byte on", []),
        (zeros_to_the_end, "zeros", "is zero from a random byte on, as after a power cut", [pytest.mark.faults]),
        (flip, "flipped", "has one bit flipped, of a random byte of the tensors", [pytest.mark.faults]),
    )
]


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was killed after its fifth step or later."""
    run = Run(tmp_path / "run").until_step(5)
    run.send(signal.SIGKILL)
    assert run.ends() == -signal.SIGKILL
    return tmp_path / "run"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 4))])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(stopped, whole, damage, seed):
    last, previous = stopped / "checkpoints" / "last.pt", stopped / "checkpoints" / "previous.pt"
    last.write_bytes(damage(last.read_bytes(), at=random.Random(seed).uniform(0.1, 0.9)))
    step = checkpoint.load(previous)["step"]
    output = survived(stopped, whole)
    assert says(output, f"checkpoint {last} is ", f"The run continues from {previous}, of step {step}")


@pytest.mark.faults
@pytest.mark.injects(
    "lost checkpoint", "a folder appears in the place of last.pt in mid-run, or before it is continued"
)
@pytest.mark.parametrize("running", [True, False])
def test_a_folder_in_the_place_of_a_checkpoint(tmp_path, whole, running):
    run, last = Run(tmp_path / "run").until_step(5), tmp_path / "run" / "checkpoints" / "last.pt"
    run.send(signal.SIGSTOP if running else signal.SIGKILL)
    if not running:
        run.ends()
    last.unlink()
    last.mkdir()
    run.send(signal.SIGCONT)
    run = run if running else Run(tmp_path / "run")
    assert run.ends() == 1, run.output
    assert f"{last} is a folder, expected a file: move it away, then continue with resume=auto" in run.output
    assert "Traceback" not in run.output
    last.rmdir()
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("lost checkpoint", "best.pt is deleted in mid-run")
def test_a_deleted_best_checkpoint(tmp_path, whole):
    run, best = Run(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "best.pt"
    run.until(best.exists)
    best.unlink()
    assert run.ends() == 0, run.output
    # The final evaluation writes it again if it is better.
    assert best.exists() or says(run.output, f"{best} (gone), step 8, ")


@pytest.mark.faults
@pytest.mark.injects("lost checkpoint", "last.pt and previous.pt of a finished run are gone; copied back afterwards")
@pytest.mark.parametrize("resume", ["auto", "null"])
def test_a_finished_run_is_not_overwritten(tmp_path, whole, resume):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for name in ("last.pt", "previous.pt"):
        (run_dir / "checkpoints" / name).unlink()
    left = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file() and file.name != ".lock"}
    run = Run(run_dir, f"resume={resume}")
    assert run.ends() == 1 and "Traceback" not in run.output and "another run_dir" in run.output
    assert all(file.read_bytes() == content for file, content in left.items())
    shutil.copytree(whole / "checkpoints", run_dir / "checkpoints", dirs_exist_ok=True)
    survived(run_dir, whole)


@pytest.mark.faults
@pytest.mark.injects("damaged checkpoint", "last.pt has a momentum buffer of another shape; restored afterwards")
def test_a_momentum_of_another_shape_is_refused(stopped, whole):
    last = stopped / "checkpoints" / "last.pt"
    good = last.read_bytes()
    state = torch.load(last, weights_only=True)
    buffers = state["optimizer"]["state"][0]
    buffers["momentum_buffer"] = buffers["momentum_buffer"][:1]
    torch.save(state, last)
    run = Run(stopped)
    assert run.ends() == 1 and "cannot be continued from its checkpoint of step" in run.output
    assert "Traceback" not in run.output
    last.write_bytes(good)
    survived(stopped, whole)


def files_of_a_megabyte() -> None:
    """Limit files to 1 MiB from the fourth checkpoint on: a write then fails as on a full disk."""
    save, calls = checkpoint.save, []

    def limited(*args, **kwargs):
        calls.append(None)
        if len(calls) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        save(*args, **kwargs)

    checkpoint.save = limited


@pytest.mark.injects("full disk", "RLIMIT_FSIZE below the size of a checkpoint, from the fourth on")
def test_no_room_for_a_checkpoint(tmp_path, whole):
    run = Run(tmp_path / "run", inject=files_of_a_megabyte)
    assert run.ends() == 1
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    assert f"error: checkpoint {last} of step 4 cannot be written: File too large" in run.output
    assert f"the last good checkpoint is kept: {last}, of step 3. Make room" in run.output
    assert "Traceback" not in run.output
    survived(tmp_path / "run", whole)


@pytest.fixture
def disk(tmp_path, whole, request):
    """A filesystem with room for `request.param` checkpoints."""
    disk, size = tmp_path / "disk", (whole / "checkpoints" / "last.pt").stat().st_size
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={int(request.param * size)}", "tmpfs", disk],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


only_root_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts filesystems")


@pytest.mark.faults
@only_root_mounts
@pytest.mark.injects("full disk", "a tmpfs with room for two checkpoints and a half; made larger afterwards")
@pytest.mark.parametrize("disk", [2.5], indirect=True)
def test_no_space_left(disk, whole):
    run = Run(disk / "run")
    assert run.ends() == 1
    assert "of step 3 cannot be written: No space left on device" in run.output and "Traceback" not in run.output
    assert "the last good checkpoint is kept" in run.output and "of step 2. Make room" in run.output
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    survived(disk / "run", whole)
    assert shutil.disk_usage(disk).free


def others_fill_the_disk() -> None:
    """Fill the disk in the fourth step, whose record is written before its checkpoint."""
    original, calls = MetricsLogger.step, []

    def step(self, *args):
        calls.append(None)
        if len(calls) == 4:
            with open(self.run_dir.parent / "of others", "wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(2**20)) == 2**20:
                    pass
                while file.write(b"0"):
                    pass
        original(self, *args)

    MetricsLogger.step = step


@pytest.mark.faults
@only_root_mounts
@pytest.mark.injects("full disk", "a tmpfs that others fill to the last byte in the fourth step; emptied afterwards")
@pytest.mark.parametrize("disk", [10], indirect=True)
def test_no_space_left_for_a_record(disk, whole):
    """The error may come from log.txt, metrics.jsonl or TensorBoard, whichever first needs another page."""
    run = Run(disk / "run", inject=others_fill_the_disk)
    assert run.ends() == 1
    last = disk / "run" / "checkpoints" / "last.pt"
    last_line = run.output[run.output.rindex("error: ") :]
    assert says(last_line, "No space left on device", f"the last good checkpoint is kept: {last}, of step 3. Make room")
    (disk / "of others").unlink()
    survived(disk / "run", whole)
