"""The same engine under train_imagenet.py: killed, asked to stop, damaged, on two ranks, and with unreadable images."""

import os
import random
import signal
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest

from engine import checkpoint
from engine.stopping import EXIT_CODE
from tests.faults import runs
from tests.faults.runs import STEPS, children, says, steps_of
from tests.faults.test_killed import killed, one_step_in_a_quarter_of_a_second
from tests.faults.test_ranks import ends, until_step

ENTRY = {"entry": "train_imagenet"}
Run, survived, torchrun = (partial(made, **ENTRY) for made in (runs.Run, runs.survived, runs.torchrun))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    return runs.complete(tmp_path_factory.mktemp("whole") / "run", **ENTRY)


@pytest.mark.injects("SIGKILL", "at a random moment of a classification")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 10))])
def test_killed_at_a_random_moment(tmp_path, whole, seed):
    run = Run(tmp_path / "run", inject=one_step_in_a_quarter_of_a_second)
    run.until_step(random.Random(seed).randrange(1, STEPS - 1))
    killed(run)
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM or SIGUSR1 to a classification and its data workers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("workers", [0, 2])
def test_asked_to_stop(tmp_path, whole, number, workers):
    run = Run(tmp_path / "run", f"data.workers={workers}", inject=one_step_in_a_quarter_of_a_second).until_step(4)
    run.send(number, workers=True)
    assert run.ends() == EXIT_CODE, run.output
    step = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"]
    assert says(run.output, f"stopped after step {step} of {STEPS}; exit status 75")
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("damaged checkpoint", "last.pt of a classification loses its end, from a random byte on")
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_checkpoint(tmp_path, whole, seed):
    run = Run(tmp_path / "run", inject=one_step_in_a_quarter_of_a_second).until_step(5)
    killed(run)
    last, previous = (tmp_path / "run" / "checkpoints" / name for name in ("last.pt", "previous.pt"))
    content = last.read_bytes()
    last.write_bytes(content[: int(random.Random(seed).uniform(0.1, 0.9) * len(content))])
    step = checkpoint.load(previous)["step"]
    assert says(survived(tmp_path / "run", whole), f"The run continues from {previous}, of step {step}")


@pytest.mark.faults
@pytest.mark.injects("a rank dies", "SIGKILL to one of two ranks of a classification under torchrun --max-restarts 1")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies(tmp_path, victim):
    launched = torchrun(tmp_path / "whole")
    assert launched.wait(120) == 0, launched.communicate()[0]
    launched = torchrun(tmp_path / "run", options=("--max-restarts", "1"))
    until_step(tmp_path / "run", 2, launched)
    if pids := children(launched.pid):
        os.kill(pids[victim], signal.SIGKILL)
    output = ends(launched, seconds=120)
    assert launched.returncode == 0, output
    survived(tmp_path / "run", tmp_path / "whole", processes=2)


@pytest.fixture
def photographs(tmp_path) -> Path:
    """48 and 8 small pictures of two classes in ImageNet's folders."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 4)):
        for name in ("n01", "n02"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                cv2.imwrite(str(folder / f"{number}.JPEG"), picture)
    return tmp_path / "images"


@pytest.mark.injects("corrupt image", "a photograph loses half of its bytes after the third step; restored afterwards")
@pytest.mark.faults
def test_a_corrupt_photograph_is_named(tmp_path, photographs):
    options = ("data=imagenet", f"data.root={photographs}", "data.crop_size=32", "data.resize=36", "data.workers=0")
    whole = runs.complete(tmp_path / "whole", *options, **ENTRY)
    run = Run(tmp_path / "run", *options).until_step(3)
    run.send(signal.SIGSTOP)
    contents = {path: path.read_bytes() for path in (photographs / "train").rglob("*.JPEG")}
    for path, content in contents.items():
        path.write_bytes(content[: len(content) // 2])
    run.send(signal.SIGCONT)
    assert run.ends() == 1 and "Traceback" not in run.output
    assert any(str(path) in run.output for path in contents)
    for path, content in contents.items():
        path.write_bytes(content)
    survived(tmp_path / "run", whole, *options)


@pytest.mark.injects("corrupt image", "every second photograph, data.on_error=skip")
@pytest.mark.faults
def test_corrupt_photographs_are_skipped_and_counted(tmp_path, photographs):
    options = ("data=imagenet", f"data.root={photographs}", "data.crop_size=32", "data.resize=36", "data.workers=0")
    options += ("data.verify=false", "data.on_error=skip")
    for path in sorted((photographs / "train").rglob("*.JPEG"))[::2]:
        path.write_bytes(path.read_bytes()[:300])
    run = Run(tmp_path / "run", *options)
    assert run.ends() == 0, run.output
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    skipped = run.output.count("skipped: ")
    assert skipped > 3 and says(run.output, f"{skipped} training images could not be read and were skipped")
