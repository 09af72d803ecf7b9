"""A task that the engine does not know: trained, evaluated, stopped and resumed to the bit, also on two processes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_seg
from engine import checkpoint, command_line
from engine import config as configuration
from engine.metrics_logger import MetricsLogger
from engine.schema.segmentation import SegmentationRun
from engine.stopping import Preempted
from eval import evaluate
from tests.faults.runs import steps_of
from tests.host_reads import host_reads
from tests.ranks import Ranks
from tests.runs import REPOSITORY, SHORT, composed
from tests.second_task.shapes import ShapesRun
from tests.second_task.train_shapes import CONFIGS, train
from tests.test_structure import windows

STEPS = 36


def shapes_config(*overrides: str):
    return command_line.composed("train_shapes", *overrides, configs=CONFIGS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of an uninterrupted run in one process."""
    run_dir = tmp_path_factory.mktemp("shapes") / "run"
    train(shapes_config(f"run_dir={run_dir}"))
    return run_dir


def test_a_run_starts_from_weights_of_its_own_network(whole, tmp_path):
    """Its modules are not called body, head and cls."""
    given = whole / "checkpoints" / "last.pt"
    train(shapes_config(f"run_dir={tmp_path}", f"init.weights={given}", "optim.lr=1e-12", "trainer.steps=1"))
    before, after = (checkpoint.load(file) for file in (given, tmp_path / "checkpoints" / "last.pt"))
    assert before["ema"].keys() == after["network"].keys()
    weights = [name for name in before["ema"] if "running" not in name and "num_batches" not in name]
    assert all(torch.allclose(before["ema"][name], after["network"][name], atol=1e-6) for name in weights)


def test_its_evaluation_waits_once_for_the_device(tmp_path):
    """Nine images in three minibatches."""
    with host_reads() as reads:
        train(shapes_config(f"run_dir={tmp_path}", "trainer.steps=1"))
    (read,) = [read for read in reads if "second_task/shapes.py" in read and "__getitem__" not in read]
    assert "evaluate: Tensor.tolist" in read


def run(run_dir: Path, stop_at: int | None = None) -> int:
    """Train from the command line, with SIGTERM once step `stop_at` is recorded, if given; return the exit status."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.second_task.train_shapes", f"run_dir={run_dir}", "resume=auto"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    if stop_at is not None:
        while started.poll() is None and stop_at not in steps_of(run_dir):
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
    return started.wait(120)


def trained_by_a_rank(rank: int, run_dir: str, stop_at: int | None = None) -> str:
    """Train on one rank; rank 1 gets SIGTERM after step `stop_at`, if given. Return how training ended."""

    def step(logger: MetricsLogger, *arguments) -> None:
        original(logger, *arguments)
        if rank == 1 and logger.all_steps == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    original = MetricsLogger.step
    try:
        MetricsLogger.step = step
        train(shapes_config(f"run_dir={run_dir}", "resume=auto", "norm.sync=true"))
        return "finished"
    except Preempted as preempted:
        return str(preempted)
    finally:
        MetricsLogger.step = original


def assert_equal_runs(one: Path, other: Path) -> None:
    states = [checkpoint.load(path / "checkpoints" / "last.pt") for path in (one, other)]
    assert [state["step"] for state in states] == [STEPS, STEPS]
    for part in ("network", "ema"):
        assert all(torch.equal(states[0][part][name], states[1][part][name]) for name in states[0][part])
    assert steps_of(one) == steps_of(other) == list(range(1, STEPS + 1))


def test_it_learns_and_leaves_a_run_directory(whole):
    results = json.loads((whole / "results.json").read_text())
    assert results["top1"] == 1 and results["images"] == 9 and results["dataset"] == "shapes"
    assert {"best.pt", "last.pt"} <= {path.name for path in (whole / "checkpoints").iterdir()}
    assert "val top-1 1.0000" in (whole / "log.txt").read_text()


def test_stopped_by_sigterm_and_resumed_it_ends_with_the_same_bits(tmp_path, whole):
    stopped = tmp_path / "stopped"
    assert run(stopped, stop_at=5) == 75
    assert 5 <= checkpoint.load(stopped / "checkpoints" / "last.pt")["step"] < STEPS
    assert run(stopped) == 0
    assert_equal_runs(stopped, whole)


def test_two_processes_stop_and_resume_together_with_the_same_bits(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ranks = Ranks(2, tmp_path)
    try:
        assert ranks.run(trained_by_a_rank, str(whole)) == ["finished"] * 2
        assert ranks.run(trained_by_a_rank, str(stopped), 5) == [f"stopped after step 6 of {STEPS}"] * 2
        assert ranks.run(trained_by_a_rank, str(stopped)) == ["finished"] * 2
    finally:
        ranks.stop()
    assert_equal_runs(stopped, whole)


def test_its_checkpoint_says_its_task_and_no_other_task_takes_it(tmp_path, whole):
    last = whole / "checkpoints" / "last.pt"
    state = checkpoint.load(last)
    assert state["task"] == "shapes" and "palette" not in state
    config = configuration.of_checkpoint(state, ShapesRun, "it")
    assert configuration.plain(config) == state["config"]
    refusal = "is for the task shapes: expected segmentation"
    with pytest.raises(ValueError, match=refusal):
        configuration.of_checkpoint(state, SegmentationRun, "it")
    with pytest.raises(ValueError, match=f"^checkpoint {last} {refusal}"):
        evaluate(composed("eval", f"checkpoint={last}"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.pt").write_bytes(last.read_bytes())
    with pytest.raises(ValueError, match=f"run_dir={tmp_path / 'run'} {refusal}"):
        train_seg.train(composed("train_seg", *SHORT, "trainer.steps=2", f"run_dir={tmp_path / 'run'}", "resume=auto"))


def test_the_entries_share_no_code():
    """Code that two entries would share belongs to the engine."""
    files = [REPOSITORY / "train_seg.py", REPOSITORY / "eval.py", Path(__file__).with_name("train_shapes.py")]
    for one, other in itertools.combinations(files, 2):
        assert not windows(one.read_text()) & windows(other.read_text())
    limits = {"train_seg.py": 90, "train_shapes.py": 60}
    assert all(len(file.read_text().splitlines()) <= limits.get(file.name, 250) for file in files)
