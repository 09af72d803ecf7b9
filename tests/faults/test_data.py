"""Images damaged while a run reads them, reads that hang, and data workers that hang or die."""

import ctypes
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from datasets import synthetic, time_limit
from tests.faults.runs import STEPS, Run, children, complete, says, steps_of, survived
from tests.mounts import mount_dead, mount_small_shared_memory, needs_mounts


@pytest.fixture(scope="module")
def street(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "streets"
    synthetic(root, "train"), synthetic(root, "val")
    return root


@pytest.fixture(scope="module")
def whole_street(street, tmp_path_factory) -> Path:
    return complete(tmp_path_factory.mktemp("whole_street") / "run", f"data.root={street}")


class Damaged:
    """Every `each`th image is truncated inside the context and restored after it."""

    def __init__(self, root: Path, each: int):
        files = [file.image for file in synthetic(root, "train").files][::each]
        self.contents = {file: file.read_bytes() for file in files}

    def __enter__(self) -> "Damaged":
        for file, content in self.contents.items():
            file.write_bytes(content[: len(content) // 2])
        return self

    def __exit__(self, *exception) -> None:
        for file, content in self.contents.items():
            file.write_bytes(content)


def paused_at(run: Run, step: int) -> Run:
    run.until_step(step)
    run.send(signal.SIGSTOP)
    return run


@pytest.mark.faults
@pytest.mark.injects("corrupt image", "all images lose half of their bytes after the third step; restored afterwards")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named(tmp_path, street, whole_street, workers):
    options = (f"data.root={street}", f"data.workers={workers}")
    run = paused_at(Run(tmp_path / "run", *options), 3)
    with Damaged(street, each=1) as damaged:
        run.send(signal.SIGCONT)
        assert run.ends() == 1, run.output
    assert "Traceback" not in run.output
    (message,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert any(str(file) in message for file in damaged.contents)
    survived(tmp_path / "run", whole_street, *options)


@pytest.mark.faults
@pytest.mark.injects("corrupt image", "every second image, data.on_error=skip")
def test_corrupt_images_are_skipped_counted_and_bounded(tmp_path, street):
    options = (f"data.root={street}", "data.on_error=skip")
    run = paused_at(Run(tmp_path / "run", *options), 3)
    with Damaged(street, each=2):
        run.send(signal.SIGCONT)
        assert run.ends() == 0, run.output
        assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
        skipped = run.output.count("skipped: ")
        assert skipped > 3 and says(run.output, f"{skipped} training images could not be read and were skipped")

        bounded = Run(tmp_path / "bounded", *options, "data.verify=false", f"data.max_skipped={skipped // 2}")
        assert bounded.ends() == 1
        assert f"more than data.max_skipped={skipped // 2}: restore them" in bounded.output


def in_the_eleventh_crop(fault: Callable[[], object]) -> None:
    """Make every process that reads crops do `fault` before its eleventh."""
    from datasets import TrainingCrops

    read, calls = TrainingCrops.__getitem__, []

    def faulty(self, key):
        calls.append(None)
        if len(calls) == 11:
            fault()
        return read(self, key)

    TrainingCrops.__getitem__ = faulty


def sleeps() -> None:
    in_the_eleventh_crop(lambda: time.sleep(10_000))


def holds_the_interpreter() -> None:
    in_the_eleventh_crop(lambda: ctypes.PyDLL(None).sleep(10_000))


def is_stopped() -> None:
    in_the_eleventh_crop(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def is_out_of_memory() -> None:
    in_the_eleventh_crop(lambda: np.empty(2**60, np.uint8))


STUCK = [
    pytest.param(fault, id=fault.__name__, marks=pytest.mark.injects("stuck data worker", how))
    for fault, how in (
        (sleeps, "sleeps for ever in the middle of a minibatch"),
        (holds_the_interpreter, "sleeps for ever in C, holding Python's lock"),
        (is_stopped, "SIGSTOP"),
    )
]
NOTHING_CAME = (
    "no data came for data.timeout_seconds=2 seconds: a disk or network folder hangs, or a process that reads"
)


def ended_in_time(run: Run, error: str) -> None:
    """Check that a run with data.timeout_seconds=2 ends with an error, without a traceback."""
    assert run.ends(seconds=40) == 1, run.output
    assert "Traceback" not in run.output and f"error: {error}" in run.output, run.output


@pytest.mark.faults
@pytest.mark.parametrize("inject", STUCK)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stuck_worker_is_reported(tmp_path, whole, workers, inject):
    options = (f"data.workers={workers}", "data.timeout_seconds=2")
    ended_in_time(Run(tmp_path / "run", *options, inject=inject), NOTHING_CAME)
    survived(tmp_path / "run", whole, *options)


@pytest.mark.faults
@pytest.mark.injects("stuck data worker", "SIGSTOP to one of them at a random moment")
@pytest.mark.parametrize("seed", range(3))
def test_a_worker_stopped_at_any_moment_is_reported(tmp_path, whole, seed):
    options = ("data.workers=2", "data.timeout_seconds=2")
    run = with_a_worker_signalled(Run(tmp_path / "run", *options, inject=slow_crops), signal.SIGSTOP, seed)
    ended_in_time(run, NOTHING_CAME)
    survived(tmp_path / "run", whole, *options)


@pytest.mark.faults
@pytest.mark.injects(
    "killed data worker", "SIGKILL to one of them at a random moment, as the kernel does without memory"
)
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_worker_is_reported(tmp_path, whole, seed):
    options = ("data.workers=2", "data.timeout_seconds=20")
    run = with_a_worker_signalled(Run(tmp_path / "run", *options, inject=slow_crops), signal.SIGKILL, seed)
    assert run.ends() == 1, run.output
    assert "error: a process that reads images died: DataLoader worker" in run.output
    survived(tmp_path / "run", whole, *options)


def slow_crops() -> None:
    """Make a minibatch take a quarter of a second: the run must outlast the test's random wait."""
    from datasets import TrainingCrops

    read = TrainingCrops.__getitem__
    TrainingCrops.__getitem__ = lambda self, key: (time.sleep(0.25 / 4), read(self, key))[1]


def with_a_worker_signalled(run: Run, number: signal.Signals, seed: int) -> Run:
    """Signal a random worker, of the training or of an evaluation, at a random moment after the first step."""
    run.until_step(1)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    workers = children(run.process.pid)
    assert len(workers) >= 2, run.output
    os.kill(random.Random(seed).choice(workers), number)
    return run


@pytest.mark.faults
@pytest.mark.injects("out of memory", "numpy is asked for 2^60 bytes in a data worker")
def test_memory_that_runs_out_in_a_worker_is_reported(tmp_path, whole):
    ended_in_time(
        Run(tmp_path / "run", "data.workers=1", inject=is_out_of_memory), "out of memory in a process that reads images"
    )
    survived(tmp_path / "run", whole)


# The class index reads labels before the first step even if nothing else does.
@pytest.mark.faults
@pytest.mark.injects("a read hangs", "a FIFO in the place of an image or label before the first step")
@pytest.mark.parametrize(
    "part, options, named",
    [
        ("image", ("data.workers=2",), True),
        ("label", ("data.workers=0",), True),
        ("image", ("data.workers=2", "data.verify=false"), False),
        ("image", ("data.workers=0", "data.verify=false"), False),
        ("label", ("sampler=class_uniform", "sampler.folder={index}", "data.verify=false"), False),
    ],
)
def test_a_file_that_blocks_its_reader(tmp_path, street, part, options, named):
    options = [f"data.root={street}", "data.timeout_seconds=2", *(key.format(index=tmp_path) for key in options)]
    whole = complete(tmp_path / "whole", *options)
    for cached in tmp_path.glob("*/index.npz"):
        cached.unlink()
    files = [getattr(file, part) for file in synthetic(street, "train").files]
    for file in files:
        file.rename(file.with_suffix(".kept"))
        os.mkfifo(file)
    try:
        run = Run(tmp_path / "run", *options)
        first = synthetic(street, "train").files[0].image
        ended_in_time(run, f"{first}: {NOTHING_CAME}" if named else NOTHING_CAME)
    finally:
        for file in files:
            file.with_suffix(".kept").rename(file)
    survived(tmp_path / "run", whole, *options)


def folder_is_gone(folder: Path, at_once: bool) -> None:
    time_limit.GRACE_SECONDS = 1
    if at_once:
        mount_dead(folder)
    else:
        in_the_eleventh_crop(lambda: mount_dead(folder))


@needs_mounts
@pytest.mark.faults
@pytest.mark.injects("a read hangs", "the data's network folder is dead, from the start or from the eleventh crop on")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_dead_network_folder(tmp_path, street, whole_street, workers, at_once):
    options = (f"data.root={street}", f"data.workers={workers}", "data.timeout_seconds=2")
    ended_in_time(Run(tmp_path / "run", *options, inject=partial(folder_is_gone, street, at_once)), NOTHING_CAME)
    survived(tmp_path / "run", whole_street, *options)


@needs_mounts
@pytest.mark.faults
@pytest.mark.injects("small /dev/shm", "a tmpfs with room for two minibatches")
def test_too_little_shared_memory(tmp_path, whole):
    ended_in_time(
        Run(tmp_path / "run", "data.workers=2", inject=mount_small_shared_memory),
        "/dev/shm is full (0 MiB, 0 MiB free)",
    )
    survived(tmp_path / "run", whole)


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


@pytest.mark.faults
@pytest.mark.injects("too few open files", "RLIMIT_NOFILE of 32, soft and hard")
def test_too_few_open_files(tmp_path, whole):
    run = Run(tmp_path / "run", "data.workers=2", inject=few_files)
    ended_in_time(run, "ulimit -n permits 32 open files: expected")
    survived(tmp_path / "run", whole)
