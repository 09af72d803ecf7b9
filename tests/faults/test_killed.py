"""SIGKILL at any moment, and signals that request a stop: only the current step is lost."""

import random
import signal
import time

import pytest

from engine import checkpoint
from engine.metrics_logger import MetricsLogger
from engine.stopping import EXIT_CODE
from tests.faults.runs import STEPS, Run, complete, says, survived


@pytest.mark.injects("SIGKILL", "at a random moment of a run that saves at every step")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 30))])
def test_killed_at_a_random_moment(tmp_path, whole, seed):
    run = Run(tmp_path / "run", inject=one_step_in_a_quarter_of_a_second)
    run.until(lambda: run.output_file.exists())
    time.sleep(random.Random(seed).uniform(0.0, STEPS / 4))
    killed(run)
    survived(tmp_path / "run", whole)


def one_step_in_a_quarter_of_a_second() -> None:
    """Slow every step down: the run must outlast the test's random wait."""
    original = MetricsLogger.step

    def step(self, *args):
        time.sleep(0.25)
        original(self, *args)

    MetricsLogger.step = step


def killed(run: Run) -> None:
    run.send(signal.SIGKILL)
    assert run.ends() == -signal.SIGKILL, "it ended before it was killed"


@pytest.mark.injects("SIGKILL", "while last.pt or best.pt is being written, at a random size of the temporary file")
@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_killed_in_the_middle_of_a_write(tmp_path, whole, seed):
    chosen = random.Random(seed)
    run = Run(tmp_path / "run").until_step(chosen.randrange(1, STEPS - 1))
    folder = tmp_path / "run" / "checkpoints"
    size = chosen.uniform(0.0, 0.9) * (whole / "checkpoints" / "last.pt").stat().st_size

    def written() -> bool:
        return any(file.stat().st_size >= size for file in folder.glob("*.pt.partial") if file.exists())

    try:
        run.until(written)
    except FileNotFoundError:  # renamed between glob and stat
        pass
    killed(run)
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("SIGKILL", "five times in one run, each time a step or two after it was continued")
def test_killed_again_and_again(tmp_path, whole, record_property):
    for step in (2, 3, 5, 7, 10):
        killed(Run(tmp_path / "run").until_step(step))
    record_property("tried", 5)
    survived(tmp_path / "run", whole)


@pytest.mark.injects("preemption", "SIGTERM or SIGUSR1 to the process, or to it and its data workers, in a random step")
@pytest.mark.parametrize(
    "number, workers, seed",
    [
        (signal.SIGTERM, 2, 1),
        *(
            pytest.param(number, workers, seed, marks=pytest.mark.faults)
            for number in (signal.SIGTERM, signal.SIGUSR1)
            for workers in (0, 2)
            for seed in range(2, 4)
        ),
    ],
)
def test_asked_to_stop(tmp_path, whole, number, workers, seed):
    run = Run(tmp_path / "run", f"data.workers={workers}").until_step(random.Random(seed).randrange(1, STEPS - 3))
    run.send(number, workers=True)
    assert run.ends() == EXIT_CODE, run.output
    step = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"]
    assert says(run.output, f"stopped after step {step} of {STEPS}; exit status 75: start it again with resume=auto")
    assert run.steps == list(range(1, step + 1))
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM in the first two seconds, while modules are imported and data is checked")
@pytest.mark.parametrize("seed", range(6))
def test_asked_to_stop_before_the_first_step(tmp_path, whole, seed):
    run = Run(tmp_path / "run", inject=slow_check)
    time.sleep(2 * seed / 5)
    run.send(signal.SIGTERM)
    status = run.ends(seconds=10)
    assert status == EXIT_CODE or (status == -signal.SIGTERM and not run.run_dir.exists()), run.output
    if status == EXIT_CODE:
        assert says(run.output, "stopped before the first step; exit status 75: start it again with resume=auto")
    survived(tmp_path / "run", whole)


def slow_check() -> None:
    """Make the check of the data take a minute."""
    import train_seg

    train_seg.verify = lambda dataset, progress: time.sleep(60)


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM in a step that never ends, data.timeout_seconds=2")
def test_a_request_that_is_not_answered(tmp_path, whole):
    run = Run(tmp_path / "run", "data.timeout_seconds=2", inject=endless_fifth_step).until_step(4)
    time.sleep(1)
    run.send(signal.SIGTERM)
    assert run.ends(seconds=20) == EXIT_CODE
    assert says(run.output, "asked to stop 2 seconds ago, but no step has ended since: ends without saving")
    survived(tmp_path / "run", whole)


def endless_fifth_step() -> None:
    original, calls = MetricsLogger.step, []

    def step(self, *args):
        calls.append(None)
        if len(calls) == 5:
            time.sleep(10_000)
        original(self, *args)

    MetricsLogger.step = step


def slow_evaluation() -> None:
    """Make an evaluation take a second per image."""
    from datasets import WholeImages

    read = WholeImages.__getitem__
    WholeImages.__getitem__ = lambda self, index: (time.sleep(1), read(self, index))[1]


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM in an evaluation")
def test_asked_to_stop_in_an_evaluation(tmp_path, whole):
    run = Run(tmp_path / "run", inject=slow_evaluation).until_step(8)
    run.send(signal.SIGTERM)
    assert run.ends() == EXIT_CODE, run.output
    assert says(run.output, "stopped during an evaluation, which will be repeated")
    assert run.steps == list(range(1, 9))
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects(
    "SIGKILL", "in a random step of a run with float16 and its loss scale, dropout and two data workers"
)
@pytest.mark.parametrize("seed", range(3))
def test_everything_that_changes_continues(tmp_path, seed):
    body = ("body=wider_resnet38_a2", "body.structure=[1,1,1,1,1,1]", "body.stem_channels=8")
    channels = "body.channels=[[8,8],[8,8],[8,8],[8,8],[8,8,8],[8,8,8]]"
    options = (*body, channels, "trainer.precision=float16", "trainer.deterministic=true", "data.workers=2")
    whole = complete(tmp_path / "whole", *options)
    assert checkpoint.load(whole / "checkpoints" / "last.pt")["scaler"]
    killed(Run(tmp_path / "run", *options).until_step(random.Random(seed).randrange(1, STEPS - 1)))
    survived(tmp_path / "run", whole, *options)
