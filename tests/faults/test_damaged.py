"""Damaged checkpoints and full disks."""

import os
import random
import resource
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest

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
