"""SIGKILL at any moment, and signals that request a stop: only the current step is lost."""

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf

import engine.training.run
from datasets import WholeImages
from engine.checkpoint import files as checkpoint
from engine.process.stopping import EXIT_CODE
from engine.records.metrics_logger import MetricsLogger
from engine.training.learner import Learner
from eval import evaluate
from models.checkpoints import torch_files
from scripts.compare_runs import Comparison, compare
from tests.faults import runs
from tests.faults.runs import (
    NAP,
    SLOWLY,
    STEPS,
    Run,
    before_call,
    case,
    killed_after,
    last_of,
    says,
    steps_of,
    survived,
    waiting_after,
)
from tests.runs import NARROW_A2, composed


@pytest.mark.faults
@pytest.mark.injects("SIGKILL", "at a random moment of a run that saves at every step")
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_a_random_moment(tmp_path, whole, seed):
    run = Run(tmp_path / "run", inject=SLOWLY)
    run.until(run.last.parent.exists)
    time.sleep(random.Random(seed).uniform(0.0, (STEPS - 1) * NAP))
    run.killed()
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("SIGKILL", "at a random moment of a classification")
@pytest.mark.parametrize("seed", range(10))
def test_a_classification_killed_at_a_random_moment(tmp_path, whole_of, seed):
    killed_after(random.Random(seed).randrange(1, STEPS - 1), tmp_path / "run", entry="train_imagenet")
    survived(tmp_path / "run", whole_of("train_imagenet"), entry="train_imagenet")


@pytest.mark.faults
@pytest.mark.injects("SIGKILL", "while last.pt or best.pt is being written, at a random size of the temporary file")
@pytest.mark.parametrize("seed", range(10))
def test_killed_in_the_middle_of_a_write(tmp_path, whole, seed):
    chosen = random.Random(seed)
    run = Run(tmp_path / "run", inject=SLOWLY).until_step(chosen.randrange(1, STEPS - 1))
    size = chosen.uniform(0.0, 0.9) * last_of(whole).stat().st_size

    def written() -> bool:
        return any(file.stat().st_size >= size for file in run.last.parent.glob("*.pt.partial") if file.exists())

    with suppress(FileNotFoundError):  # renamed between glob and stat
        run.until(written)
    run.killed()
    survived(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "steps",
    [
        (2, 5),
        case("SIGKILL", "five times in one run, each time a step or two after it was continued", (2, 3, 5, 7, 10)),
    ],
)
def test_killed_again_and_again(tmp_path, whole, steps, record_property):
    for step in steps:
        killed_after(step, tmp_path / "run")
    record_property("tried", len(steps))
    survived(tmp_path / "run", whole)


def asked_to_stop(run_dir, whole, number: signal.Signals, workers: int, step: int, entry: str = "train_seg") -> None:
    run = Run(run_dir, f"data.workers={workers}", entry=entry, inject=waiting_after(step))
    run.until_step(step).send(number, workers=True)
    (run_dir / "go").touch()
    assert run.ends() == EXIT_CODE, run.output
    runs.stopped(run_dir, run.output)
    survived(run_dir, whole, entry=entry)


ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EITHER = [(number, workers) for number in ASKING for workers in (0, 2)]
RANDOM_STEPS = [(*each, seed) for each in EITHER for seed in (2, 3)]


@pytest.mark.injects(
    "preemption", "SIGTERM, SIGUSR1 or SIGINT to the process, or to it and its data workers, in a random step"
)
@pytest.mark.parametrize(
    "number, workers, seed",
    [(signal.SIGTERM, 2, 1), *(pytest.param(*each, marks=pytest.mark.faults) for each in RANDOM_STEPS)],
)
def test_asked_to_stop(tmp_path, whole, number, workers, seed):
    asked_to_stop(tmp_path / "run", whole, number, workers, step=random.Random(seed).randrange(1, STEPS - 3))


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM, SIGUSR1 or SIGINT to a classification and its data workers")
@pytest.mark.parametrize("number, workers", EITHER)
def test_a_classification_is_asked_to_stop(tmp_path, whole_of, number, workers):
    asked_to_stop(tmp_path / "run", whole_of("train_imagenet"), number, workers, step=4, entry="train_imagenet")


def slow_check() -> None:
    before_call(engine.training.run, "verify", None, runs.sleeps_for_ever)


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


def sends(number: signal.Signals, *_) -> None:
    os.kill(os.getpid(), number)


def before_resuming(place: str, then, *given) -> None:
    """`before_call` of the place; by its name, because modules cannot be sent to another process."""
    before_call(*WHILE_RESUMING[place], then, *given)


WHILE_RESUMING = {
    "verified": (torch_files, "_check_bytes", 1),
    "read": (torch.serialization, "_load", 1),
    "loaded": (torch.Tensor, "copy_", 20),
}


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM, SIGUSR1 or SIGINT while the only checkpoint is verified, read or loaded")
@pytest.mark.parametrize("number", ASKING)
@pytest.mark.parametrize("place", WHILE_RESUMING)
def test_asked_to_stop_while_it_is_resumed(tmp_path, whole, number, place):
    killed_after(5, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "previous.pt").unlink()
    run = Run(tmp_path / "run", inject=partial(before_resuming, place, partial(sends, number)))
    assert run.ends() == EXIT_CODE and "damaged" not in run.output, run.output
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM, SIGUSR1 or SIGINT in the first step")
@pytest.mark.parametrize("number", ASKING)
def test_asked_to_stop_in_the_first_step(tmp_path, whole, number):
    run = Run(tmp_path / "run", inject=partial(before_call, Learner, "backward", 1, partial(sends, number)))
    assert run.ends() == EXIT_CODE, run.output
    runs.stopped(tmp_path / "run", run.output)
    survived(tmp_path / "run", whole)


def sends_and_ends_the_compiler(number: signal.Signals, *_) -> None:
    """A signal to the whole process group also ends g++ and PyTorch's helpers."""
    sends(number)
    raise RuntimeError("C++ compile error: died with <Signals.SIGUSR1: 10>")


@pytest.mark.faults
@pytest.mark.parametrize("number", ASKING)
def test_asked_to_stop_while_the_first_step_compiles(tmp_path, whole, number):
    run = Run(
        tmp_path / "run",
        inject=partial(before_call, Learner, "backward", 1, partial(sends_and_ends_the_compiler, number)),
    )
    assert run.ends() == EXIT_CODE and says(run.output, "stopped in step 1, which did not end"), run.output
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects(
    "SIGKILL", "after the evaluation, before the last step; evaluated by eval.py and compared meanwhile"
)
def test_a_killed_run_that_was_evaluated_has_not_ended(tmp_path, whole):
    run = killed_after(8, tmp_path / "run").run_dir
    evaluate(composed("eval", f"checkpoint={run}", "workers=0", "device=cpu"))
    step = checkpoint.load(last_of(run))["step"]
    assert not (run / "results.json").exists() and (run / f"results_step{step}_all_images.json").exists()
    with pytest.raises(ValueError, match=f"it has not ended .step {steps_of(run)[-1]}"):
        compare(OmegaConf.structured(Comparison(runs=str(run), out=str(tmp_path / "report"))))
    survived(run, whole)


def takes_a_second(*_) -> None:
    time.sleep(1)


@pytest.mark.faults
@pytest.mark.injects("preemption", "SIGTERM in an evaluation")
def test_asked_to_stop_in_an_evaluation(tmp_path, whole):
    slow_evaluation = partial(before_call, WholeImages, "__getitem__", None, takes_a_second)
    run = Run(tmp_path / "run", inject=slow_evaluation).until_step(8)
    run.send(signal.SIGTERM)
    assert run.ends() == EXIT_CODE, run.output
    assert says(run.output, "stopped during an evaluation, which will be repeated")
    assert steps_of(tmp_path / "run") == list(range(1, 9))
    survived(tmp_path / "run", whole)


@pytest.mark.faults
@pytest.mark.injects(
    "SIGKILL", "in a random step of a run with float16 and its loss scale, dropout and two data workers"
)
@pytest.mark.parametrize("seed", range(3))
def test_everything_that_changes_continues(tmp_path, seed):
    options = (*NARROW_A2, "trainer.precision=float16", "trainer.deterministic=true", "data.workers=2")
    runs.finished(tmp_path / "whole", *options)
    assert checkpoint.load(last_of(tmp_path / "whole"))["scaler"]
    killed_after(random.Random(seed).randrange(1, STEPS - 1), tmp_path / "run", *options)
    survived(tmp_path / "run", tmp_path / "whole", *options)


def a_terminal_that_is_closed_after_a_step() -> None:
    terminal, own_end = os.openpty()
    for number in (1, 2):
        os.dup2(own_end, number)
    os.close(own_end)
    os.environ["FORCE_COLOR"] = "1"  # draws a progress bar
    before_call(MetricsLogger, "step", 2, lambda *_: os.close(terminal))


def a_reader_that_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for number in (1, 2):
        os.dup2(writer, number)


def a_full_disk_for_messages() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(full, number)


@pytest.mark.parametrize(
    "inject",
    [
        case("lost output", "the terminal is closed and SIGHUP ignored", a_terminal_that_is_closed_after_a_step),
        case("lost output", "the reader of a pipe has ended", a_reader_that_is_gone, slow=False),
        case("lost output", "standard output is /dev/full", a_full_disk_for_messages),
    ],
)
def test_nobody_reads_what_is_printed(tmp_path, whole, inject):
    run = Run(tmp_path / "run", inject=inject)
    assert run.ends() == 0
    survived(tmp_path / "run", whole)
