"""Damaged checkpoints and full disks."""

import json
import os
import random
import resource
import shutil
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from engine.checkpoint import files as checkpoint
from engine.records.metrics_logger import MetricsLogger
from tests.faults.runs import SLOWLY, Run, before_call, case, finished, killed_after, last_of, says, survived


def truncate(content: bytes, at: float) -> bytes:
    return content[: int(at * len(content))]


def zeros_to_the_end(content: bytes, at: float) -> bytes:
    return truncate(content, at).ljust(len(content), b"\0")


def flip(content: bytes, at: float) -> bytes:
    place = int(at * len(content))
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


DAMAGES = [
    case("damaged checkpoint", "last.pt loses its end, from a random byte on", "train_seg", truncate, slow=False),
    case(
        "damaged checkpoint",
        "last.pt of a classification loses its end, from a random byte on",
        "train_imagenet",
        truncate,
    ),
    case(
        "damaged checkpoint",
        "last.pt is zero from a random byte on, as after a power cut",
        "train_seg",
        zeros_to_the_end,
    ),
    case("damaged checkpoint", "last.pt has one bit flipped, of a random byte of the tensors", "train_seg", flip),
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 4))])
@pytest.mark.parametrize("entry, damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path, whole_of, entry, damage, seed):
    run = killed_after(5, tmp_path / "run", entry=entry)
    previous = run.last.with_name("previous.pt")
    run.last.write_bytes(damage(run.last.read_bytes(), at=random.Random(seed).uniform(0.1, 0.9)))
    step = checkpoint.load(previous)["step"]
    output = survived(run.run_dir, whole_of(entry), entry=entry)
    assert says(output, f"checkpoint {run.last} is ", f"The run continues from {previous}, of step {step}")


@pytest.mark.faults
@pytest.mark.injects("lost checkpoint", "last.pt and previous.pt of a finished run are gone; copied back afterwards")
@pytest.mark.parametrize("resume", ["auto", "null"])
def test_a_finished_run_is_not_overwritten(tmp_path, whole, resume):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for name in ("last.pt", "previous.pt"):
        (run_dir / "checkpoints" / name).unlink()
    left = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file() and file.name != ".lock"}
    Run(run_dir, f"resume={resume}").fails("another run_dir")
    assert all(file.read_bytes() == content for file, content in left.items())
    shutil.copytree(whole / "checkpoints", run_dir / "checkpoints", dirs_exist_ok=True)
    survived(run_dir, whole)


@pytest.mark.faults
@pytest.mark.injects("lost checkpoint", "best.pt is deleted in mid-run")
def test_a_deleted_best_checkpoint(tmp_path, whole):
    run, best = Run(tmp_path / "run", inject=SLOWLY), tmp_path / "run" / "checkpoints" / "best.pt"
    run.until(best.exists)
    best.unlink()
    assert run.ends() == 0, run.output
    # The final evaluation writes it again if it is better.
    assert best.exists() or says(run.output, f"{best} (gone), step 8, ")


def zeros_from_the_evaluation(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in lines if json.loads(line)["step"] < 8)
    file.write_bytes(kept + bytes(len(b"".join(lines)) - len(kept)))


@pytest.mark.faults
@pytest.mark.parametrize(
    "damage",
    [
        case("lost records", "metrics.jsonl has zeros from step 8 on, as after a power cut", zeros_from_the_evaluation),
        case("lost records", "metrics.jsonl is deleted", Path.unlink),
    ],
)
def test_the_best_checkpoint_outlives_its_record(tmp_path, whole, damage):
    run = killed_after(11, tmp_path / "run")
    damage(run.run_dir / "metrics.jsonl")
    finished(run.run_dir)
    best, expected = (checkpoint.load(path / "checkpoints" / "best.pt") for path in (run.run_dir, whole))
    assert best["step"] == expected["step"] == 8


@pytest.mark.faults
@pytest.mark.injects("twice at once", "the same command is started again; the first is stopped meanwhile")
def test_the_second_of_two_runs_names_the_first(tmp_path, whole):
    first = Run(tmp_path / "run", inject=SLOWLY).until_step(2)
    second = Run(tmp_path / "run")
    second.until(lambda: "waiting for it to end" in second.output)
    assert says(second.output, f"another process (process {first.process.pid} on ")
    first.killed()
    assert second.ends() == 0
    survived(tmp_path / "run", whole)


def files_of_a_megabyte() -> None:
    """From the fourth checkpoint on, a write of more fails as on a full disk."""
    limits = (2**20, resource.RLIM_INFINITY)
    before_call(checkpoint, "save", 4, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


@pytest.mark.injects("full disk", "RLIMIT_FSIZE below the size of a checkpoint, from the fourth on")
def test_no_room_for_a_checkpoint(tmp_path, whole):
    run = Run(tmp_path / "run", inject=files_of_a_megabyte)
    output = run.fails(f"error: checkpoint {run.last} of step 4 cannot be written: File too large")
    assert f"the last good checkpoint is kept: {run.last}, of step 3. Make room" in output
    survived(tmp_path / "run", whole)


@pytest.fixture
def disk(tmp_path, whole, request):
    """A filesystem with room for `request.param` checkpoints."""
    disk, size = tmp_path / "disk", int(request.param * last_of(whole).stat().st_size)
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
    mounted = subprocess.run(command, capture_output=True, text=True)
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
    no_room = "of step 3 cannot be written: No space left on device"
    Run(disk / "run").fails(no_room, "the last good checkpoint is kept", "of step 2. Make room")
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    survived(disk / "run", whole)
    assert shutil.disk_usage(disk).free


def others_fill_the_disk(logger: MetricsLogger, *_) -> None:
    with open(logger.run_dir.parent / "of others", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**20)) == 2**20:
            pass
        while file.write(b"0"):
            pass


@pytest.mark.faults
@only_root_mounts
@pytest.mark.injects("full disk", "a tmpfs that others fill to the last byte in the fourth step; emptied afterwards")
@pytest.mark.parametrize("disk", [10], indirect=True)
def test_no_space_left_for_a_record(disk, whole):
    """The error may come from log.txt, metrics.jsonl or TensorBoard, whichever first needs another page."""
    # The record of a step is written before its checkpoint.
    run = Run(disk / "run", inject=partial(before_call, MetricsLogger, "step", 4, others_fill_the_disk))
    assert run.ends() == 1
    kept = f"the last good checkpoint is kept: {run.last}, of step 3. Make room"
    assert says(run.output[run.output.rindex("error: ") :], "No space left on device", kept)
    (disk / "of others").unlink()
    survived(disk / "run", whole)
