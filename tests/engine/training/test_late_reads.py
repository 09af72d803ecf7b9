"""The loop reads a step's numbers one step later, and before whatever depends on them; and it repeats little."""

import itertools
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from engine.process.distributed import World
from engine.process.stopping import Preempted, StopRequest
from engine.records.metrics_logger import MetricsLogger
from engine.schema.schedule import Schedule
from engine.segmentation.cross_entropy import CrossEntropy
from engine.training import loop
from engine.training.learner import Learner
from engine.training.run import Run
from keepless.reversible import checks
from tests.engine.learners import learner_of
from tests.runs import REPOSITORY, run_config

WORLD_SIZE, STEPS = 2, 7


class FakeRun(SimpleNamespace):
    """The parts of a run that the loop needs, on one rank; `events` lists what happens."""

    def __init__(self, world: World, schedule: Schedule, network: nn.Module, **options: object):
        super().__init__(world=world, schedule=schedule, learner=learner_of(network, **options), start_step=0)
        self.events: list[tuple[str, int]] = []
        self.stop = StopRequest()
        console = Console(quiet=True)
        self.metrics = MetricsLogger(None, console, score="miou", total_steps=schedule.total_steps, start_step=0)
        self.directory = SimpleNamespace(finish_saving=lambda: None, raise_if_save_failed=lambda: None)
        trainer = SimpleNamespace(profile=0)
        data = SimpleNamespace(crops_per_minibatch=2)
        self.config = SimpleNamespace(trainer=trainer, data=data)
        self.share_plans = lambda: self.events.append(("share", loop.PLANNED_STEPS))
        self.begin = lambda loss, minibatches: None  # nothing to continue
        self.deliver_minibatches = lambda minibatches, loss: minibatches

    def save(self, step: int) -> None:
        self.events.append(("save", step))

    def evaluate(self, step: int, evaluate: object) -> int:
        self.events.append(("evaluate", step))
        return step


def minibatches(steps: int, size: int = 64, before: Callable[[int], object] = lambda number: None):
    for number in range(1, steps + 1):
        before(number)
        images = torch.full((2, 3, size, size), number, dtype=torch.uint8)
        labels = torch.zeros(2, size, size, dtype=torch.uint8)
        yield {"image": images, "label": labels, "name": [f"crop {number}"]}


def small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 19, 1))


@pytest.fixture
def noted(monkeypatch) -> FakeRun:
    run = FakeRun(World(), Schedule(STEPS, STEPS, evaluate_every=5, checkpoint_every=3, log_every=2), small_network())
    take = loop.train_step
    read = Learner.read
    launched = []

    def train_step(*arguments: object) -> object:
        outcome = take(*arguments)
        launched.append(outcome)
        run.events.append(("take", len(launched)))
        return outcome

    def noted_read(learner: Learner, outcome: object) -> object:
        number = next(number for number, other in enumerate(launched, start=1) if other is outcome)
        run.events.append(("read", number))
        return read(learner, outcome)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(Learner, "read", noted_read)
    return run


def test_a_step_is_read_after_the_next_is_launched_and_before_checkpoints_evaluations_and_the_end(noted):
    assert loop.train(noted, minibatches(STEPS), CrossEntropy(), lambda: None) == STEPS
    assert [f"{event} {step}" for event, step in noted.events] == [
        *("take 1", "take 2", "read 1", "take 3", "share 3", "read 2", "read 3", "save 3"),
        *("take 4", "take 5", "read 4", "read 5", "save 5", "evaluate 5"),
        *("take 6", "read 6", "save 6", "take 7", "read 7", "save 7", "evaluate 7"),
    ]
    assert noted.metrics.process_sums["steps"] == STEPS


def test_a_run_within_a_budget_shares_its_plans():
    """tests/keepless/recompute/test_fsdp2.py shows that all ranks then follow rank 0's."""
    config = run_config("trainer.recompute=budget", "memory.activations=1MiB")
    run = SimpleNamespace(config=config, learner=SimpleNamespace(network=small_network()))
    with pytest.raises(ValueError, match="share_plans got a network without a budget"):
        Run.share_plans(run)


def test_each_step_counts_its_own_time_and_wait(noted, monkeypatch):
    """A minibatch takes five seconds, and each look at the clock a millisecond; steps 5 and 7 are read with others."""
    ticks = itertools.count()
    counted = []
    slowly = minibatches(STEPS, before=lambda _: [next(ticks) for _ in range(5000)])

    def training(*_: object) -> None:
        counted.append(dict(noted.metrics.recent_sums))
        noted.metrics.recent_sums.clear()

    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 1000)
    monkeypatch.setattr(noted.metrics, "record_training", training)
    noted.schedule = Schedule(STEPS, STEPS, evaluate_every=5, checkpoint_every=STEPS, log_every=1)
    loop.train(noted, slowly, CrossEntropy(), lambda: None)
    assert len(counted) == STEPS and all(5 < numbers["data_s"] < numbers["seconds"] < 5.1 for numbers in counted)


def test_a_stop_loses_no_step(noted):
    with_signal = minibatches(STEPS, before=lambda number: number == 4 and os.kill(os.getpid(), signal.SIGUSR1))
    with noted.stop, pytest.raises(Preempted, match="^stopped after step 4 of 7$"):
        loop.train(noted, with_signal, CrossEntropy(), lambda: None)
    assert noted.events[-2:] == [("read", 4), ("save", 4)] and noted.metrics.process_sums["steps"] == 4


def test_a_step_that_is_not_finite_is_named_one_step_later(noted):
    factors = itertools.chain([1.0, math.inf], itertools.repeat(1.0))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return CrossEntropy()(logits, labels) * next(factors)

    largest = r"the weights with the largest norm are 1\.weight \(2\.83\)"
    with pytest.raises(FloatingPointError, match=rf"^step 2: the loss is inf; {largest} \(images crop 2\)$"):
        loop.train(noted, minibatches(STEPS), loss, lambda: None)
    assert noted.events == [("take", 1), ("take", 2), ("read", 1), ("take", 3), ("share", 3), ("read", 2)]


def test_repetitions_of_reversible_branches_are_checked_in_the_first_two_steps(noted, monkeypatch):
    take = loop.train_step
    checked = []
    monkeypatch.setattr(loop, "train_step", lambda *args: checked.append(checks._enabled.get()) or take(*args))
    loop.train(noted, minibatches(STEPS), CrossEntropy(), lambda: None)
    assert checked == [step < 2 for step in range(STEPS)]


def calls_per_step(size: int, **options: object) -> Counter[str]:
    """Calls of Python functions of our files in the last step but one, outside of a network that has none of them."""
    schedule = Schedule(8, 8, evaluate_every=None, checkpoint_every=100, log_every=100)
    run = FakeRun(World(), schedule, small_network(), **options)
    counted = Counter()

    def note(frame: object, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{REPOSITORY}/") and "/.venv/" not in path and path != __file__:
            counted[f"{Path(path).name}: {frame.f_code.co_name}"] += 1

    watched = minibatches(8, size, before=lambda number: sys.setprofile(note if number == 7 else None))
    try:
        loop.train(run, watched, CrossEntropy(fraction=0.25), lambda: None)
    finally:
        sys.setprofile(None)
    return counted


def test_a_step_calls_few_of_our_functions():
    """129 when every step was read at once. Larger crops have more tiles, and the loss called once for each row."""
    small = calls_per_step(64)
    large = calls_per_step(128)
    of_loss = sum(count for name, count in small.items() if name.startswith("losses.py"))
    assert sum(small.values()) <= 1.03 * 44 and sum(small.values()) - of_loss <= 16, small
    assert sum(large.values()) <= 1.03 * 58, large - small


def stopped(rank: int) -> tuple[str, list, int, int]:
    """How a run ends if rank 1 is asked to stop in step 3, and the collectives of its steps."""
    run = FakeRun(World(rank, WORLD_SIZE), Schedule(STEPS, STEPS, None, 100, 100), small_network())
    run.config.data.crops_per_minibatch = 4
    collectives = []
    reduce = dist.all_reduce

    def noted_reduce(tensor: torch.Tensor) -> None:
        collectives.append(len(run.events))
        reduce(tensor)

    def ask(number: int) -> None:
        if rank == 1 and number == 3:
            run.stop.requested = True

    dist.all_reduce = noted_reduce
    try:
        loop.train(run, minibatches(STEPS, before=ask), CrossEntropy(), lambda: None)
    except Preempted as error:
        return str(error), run.events, run.metrics.process_sums["steps"], len(collectives)
    finally:
        dist.all_reduce = reduce
    raise AssertionError("the run was not stopped")


def test_all_ranks_stop_after_the_same_step_without_a_collective_of_their_own(ranks):
    """There is one collective for the question before the first step, and one for each step's loss."""
    expected = ("stopped after step 4 of 7", [("share", 3), ("save", 4)], 4, 1 + 4)
    assert ranks.run(stopped) == [expected, expected]
