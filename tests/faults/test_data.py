"""Images damaged while a run reads them, and data workers that hang or die."""

import os
import signal
import time
from pathlib import Path

import pytest

from datasets import synthetic
from tests.faults.runs import STEPS, Run, children, complete, says, steps_of, survived


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


def hangs() -> None:
    """From a worker's eleventh crop on, reading hangs."""
    from datasets import TrainingCrops

    read, calls = TrainingCrops.__getitem__, []

    def stuck(self, key):
        calls.append(None)
        if len(calls) > 10:
            time.sleep(10_000)
        return read(self, key)

    TrainingCrops.__getitem__ = stuck


@pytest.mark.faults
@pytest.mark.injects("stuck data worker", "sleeps forever in the middle of a minibatch; data.timeout_seconds=2")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stuck_worker_is_reported(tmp_path, whole, workers):
    options = (f"data.workers={workers}", "data.timeout_seconds=2")
    run = Run(tmp_path / "run", *options, inject=hangs)
    assert run.ends(seconds=40) == 1
    assert f"error: the data.workers={workers} processes that read images delivered none for" in run.output
    assert "data.timeout_seconds=2 seconds" in run.output and "Traceback" not in run.output
    survived(tmp_path / "run", whole, *options)


@pytest.mark.faults
@pytest.mark.injects("killed data worker", "SIGKILL to one of two, as the kernel does where memory is short")
def test_a_killed_worker_is_reported(tmp_path, whole):
    options = ("data.workers=2", "data.timeout_seconds=20")
    run = Run(tmp_path / "run", *options)
    run.until_step(3)
    worker = children(run.process.pid)[0]
    os.kill(worker, signal.SIGKILL)
    assert run.ends() == 1, run.output
    assert "error: one of the data.workers=2 processes that read images died: DataLoader worker" in run.output
    survived(tmp_path / "run", whole, *options)
