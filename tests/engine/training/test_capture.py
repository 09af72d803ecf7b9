"""Captured micro-batches, with a stand-in for CUDA graphs: the trainings of eager ones, and what is refused."""

import copy
import gc
import itertools
import os
import random
import re
import signal
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World, data_parallel
from engine.process.stopping import Preempted
from engine.schema.training import TrainingRun
from engine.segmentation.cross_entropy import CrossEntropy, SummedLoss
from engine.training import build, capture, loop, planner
from engine.training.capture import CapturedMicroBatches, NotCaptured, Recorder
from engine.training.learner import Learner, Outcome, WeightAverage
from engine.training.loop import Loss, accumulate_gradients, train_step
from keepless import InPlaceABN
from keepless.torch_internals import is_capturing
from tests.engine.learners import forward_of, learner_of, minibatch
from tests.engine.training.tape import recorded_on
from tests.runs import NARROW_A2, SHORT, checked, one_epoch, run_config, same
from train_seg import train

ADVICE, WORLD_SIZE = "give trainer.capture=auto or false", 2
CROSS_ENTROPY = CrossEntropy(fraction=0.25)
SUMMED = SummedLoss(lambda stride: CrossEntropy(fraction=0.25, stride=stride))  # of a `SegmentationNetwork`
WAITS = RuntimeError("operation not permitted when stream is capturing")
NO_MEMORY = torch.OutOfMemoryError("no memory")

pytestmark = pytest.mark.filterwarnings("ignore:nothing is recomputed under Tape")


class Unused(nn.Sequential):
    """Has a parameter without a gradient, which weight decay must not change."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.unused = nn.Parameter(torch.ones(3))


def small_learner(captured: bool = False, precision: str = "float32", extra: nn.Module | None = None) -> Learner:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), InPlaceABN(8, backend="eager"), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    network = Unused(*layers, extra or nn.ReLU(), nn.Conv2d(8, 5, 1))
    network.to(memory_format=torch.channels_last)
    learner = learner_of(network, precision=precision, accumulation_steps=2, max_gradient_norm=1.0)
    learner.optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.1)
    learner.optimizer.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in network.parameters()})
    if captured:
        learner.captured = CapturedMicroBatches(network, record=recorded_on(network))
    return learner


def losses_of(learner: Learner, steps: int, loss: Loss = CROSS_ENTROPY, channels: int = 3) -> list[float]:
    """Return the losses of steps that are captured from the fourth on, and again after the sixth."""
    losses = []
    for number in range(steps):
        if learner.captured is not None and number == 3:
            learner.captured.begin()
        if learner.captured is not None and number == 6:
            learner.captured.release()  # for an evaluation
        images = minibatch(number, channels=channels)
        outcome = train_step(learner, loss, images, minibatch_size=4, world=World())
        losses.append(learner.read(outcome)[0])
    return losses


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_captured_steps_are_the_eager_ones_to_the_bit(precision):
    """Two micro-batches: if autograd took over static gradients, the first would count twice."""
    eager = small_learner(precision=precision)
    captured = small_learner(True, precision)
    assert losses_of(captured, 8) == losses_of(eager, 8)
    assert captured.captured.replay is not None
    assert same(captured.network.state_dict(), eager.network.state_dict())  # with running statistics and their count
    assert captured.network.unused.grad is None and torch.equal(captured.network.unused, torch.ones(3))


class Twice(nn.Conv2d):
    """Uses its weight twice, whose cast autocast keeps for the second time: its gradients are summed in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).relu())


def test_a_weight_that_is_used_twice_is_cast_as_often_as_in_eager_steps():
    twice = Twice(8, 8, 3, padding=1)
    eager, captured = (small_learner(is_captured, "bfloat16", copy.deepcopy(twice)) for is_captured in (False, True))
    assert losses_of(captured, 8) == losses_of(eager, 8)
    assert same(captured.network.state_dict(), eager.network.state_dict())


@pytest.mark.table
@pytest.mark.parametrize(
    "words",
    [
        ("norm=std", "trainer.recompute=activations"),
        ("body=revnet_tiny", "norm=std"),
        ("data=folder", "data.channels=6", "data.mean=[0.5,0.5,0.5,0.5,0.5,0.5]", "data.std=[1,1,1,1,1,1]"),
    ],
)
def test_recomputed_and_reversible_steps_and_those_of_six_channels_read_nothing_that_was_freed(words):
    """A graph does not keep what a recomputation reads. Here the stand-in asserts that somebody does."""
    config = run_config(*SHORT, "body=resnext_tiny", "norm.backend=eager", "head.hidden_channels=8", *words)
    losses = []
    for captured in (False, True):
        learner = build.learner(config, 5, one_epoch(50), World())
        if captured:
            learner.captured = CapturedMicroBatches(learner.network, record=recorded_on(learner.network))
        losses.append(losses_of(learner, 8, SUMMED, config.data.channels))
    assert losses[0] == losses[1]


def capture_on_the_cpu(patch: pytest.MonkeyPatch, fails: bool) -> None:
    """Let trainings capture with the stand-in, which draws no number; or the capture fails at its end."""

    def record_on(network: nn.Module) -> Recorder:
        record = recorded_on(network)

        def recorded(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            def failing() -> Tensor:
                function()
                raise WAITS

            state = torch.get_rng_state()
            recording = record(failing if fails else function)
            torch.set_rng_state(state)
            return recording

        return recorded

    def captured(network: nn.Module, *arguments: Any) -> CapturedMicroBatches:
        return CapturedMicroBatches(network, *arguments, record_on(network))

    for name in ("capture_problem", "capture_doubt"):
        patch.setattr(TrainingRun, name, lambda *_, **__: None)
    patch.setattr(build, "CapturedMicroBatches", captured)


def run(folder: Path, *words: str) -> dict[str, Tensor]:
    """Weights, moments and averages after a run of train_seg.py with an evaluation in the middle."""
    steps = ("trainer.steps=11", "trainer.evaluate_every_steps=5", "data.crop_size=32", "data.crops_per_minibatch=4")
    small = ("body=resnext_tiny", "head.hidden_channels=8", "head.out_channels=8")
    train(checked("train_seg", f"run_dir={folder}", *SHORT, *steps, *small, *words))
    state = checkpoint.load(folder / "checkpoints" / "last.pt")
    assert state["step"] == 11
    leaves = tree_leaves([state["network"], state["optimizer"], state.get("ema"), state["random"]])
    return {str(number): leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


FLOAT16 = ("norm=inplace", "trainer.precision=float16", "trainer.accumulation_steps=2", "trainer.ema_decay=0.9")
BUDGET = ("norm=std", "trainer.recompute=budget", "memory.activations=4MiB", "trainer.precision=bfloat16")
DROPOUT = (*NARROW_A2, "norm=std", "trainer.recompute=activations", "optim.fused=false")
REVERSIBLE = ("body=revnet_tiny", "norm=checkpoint", "optim=adamw", "optim.max_gradient_norm=1")


AUTO, TRUE, FALSE = (f"trainer.capture={value}" for value in ("auto", "true", "false"))
FAILS = "++trainer.capture=auto"  # auto too; the capture fails


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, capture, then",
    [
        (FLOAT16, TRUE, TRUE),
        (BUDGET, TRUE, FALSE),
        (DROPOUT, AUTO, TRUE),
        (REVERSIBLE, FALSE, AUTO),
        (FLOAT16, FAILS, FAILS),
        (DROPOUT, FAILS, FALSE),
    ],
    ids=["float16", "budget", "dropout", "reversible", "falls back", "falls back with dropout"],
)
def test_captured_runs_stop_resume_and_end_as_eager_ones(tmp_path, drawn, monkeypatch, words, capture, then):
    """Steps are captured from the fourth to the seventh, in which a signal comes; the resumed run captures the last.

    The evaluation after the fifth frees the graph. If a capture fails, the run goes on eagerly. Checkpoints say which.
    """
    words = (*words, "data=cityscapes", f"data.root={drawn}")
    whole = run(tmp_path / "whole", *words)
    capture_on_the_cpu(monkeypatch, fails=FAILS in (capture, then))
    numbers = itertools.count(1)
    take = loop.train_step

    def with_signal(*arguments: Any) -> Outcome:
        if next(numbers) == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Preempted, match="^stopped after step 7 of 11$"):
        patch.setattr(loop, "train_step", with_signal)
        run(tmp_path / "run", *words, capture)
    assert same(run(tmp_path / "run", *words, then, "resume=auto"), whole)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("capture off: the network or its loss cannot be captured") == [capture, then].count(FAILS)
    decided = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["config"]["trainer"]["capture"]
    assert decided is (then not in (FALSE, FAILS))


def test_gradients_keep_their_place_and_the_memory_format_of_their_weights():
    learner = small_learner(True)
    losses_of(learner, 4)
    places = [p.grad.data_ptr() for p in learner.network.parameters() if p.grad is not None]
    losses_of(learner, 7)
    assert places == [p.grad.data_ptr() for p in learner.network.parameters() if p.grad is not None]
    assert learner.network[0].weight.grad.stride() == learner.network[0].weight.stride()
    assert all(place % 512 == places[0] % 512 for place in places)  # aligned as an allocator would


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]):
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.draw() if self.training else 1.0)


class Sometimes(nn.Module):
    """Uses its weight in a capture only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if is_capturing() else x


class Counts(nn.Module):
    """Has something that changes with each call, and an attribute that the first call sets."""

    total = 0

    def __init__(self, state: Any = None, change: Callable[["Counts"], None] | None = None):
        super().__init__()
        self.state = state
        self.change = change
        self.first = None
        self.outputs = []
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.first = x.shape
        self.outputs = [x]
        if self.training:
            self.change(self) if self.change else setattr(self, "factor", 0.99 * self.factor)
        return x * self.factor


def test_crops_of_another_size_are_refused():
    learner = small_learner(True)
    losses_of(learner, 4)
    wide = {"image": torch.zeros(4, 3, 8, 9, dtype=torch.uint8), "label": torch.zeros(4, 8, 9, dtype=torch.uint8)}
    message = r"images of shapes \(2, 3, 8, 9\) and \(2, 3, 8, 8\) cannot share a CUDA graph"
    with pytest.raises(ValueError, match=message):
        train_step(learner, CrossEntropy(), wide, minibatch_size=4, world=World())


@pytest.mark.parametrize(
    "options, processes, problem",
    [
        (["trainer.device=cpu"], 1, "only a CUDA device has graphs, and this is a CPU"),
        (["norm=package"], 1, "norm=package, the released layer, has not been tried in a CUDA graph"),
        (["trainer.compile=true"], 1, "trainer.compile=true makes code that has graphs of its own"),
        (["data.crops_per_minibatch=9"], 2, "data.crops_per_minibatch=9 over 2 processes makes micro-batches of "),
        (["data.crops_per_minibatch=9", "trainer.accumulation_steps=2"], 1, "data.* over trainer.accumulation_steps="),
        (["norm.sync=true"], 2, "norm.sync=true over 2 processes has not been tried in a CUDA graph"),
    ],
)
def test_combinations_that_cannot_be_captured_are_refused(options, processes, problem):
    """The same reasons make trainer.capture=auto train eagerly."""
    words = ["trainer.device=cuda", "trainer.capture=true", *options]
    message = f"^trainer.capture=true: {problem}.*; {ADVICE}$"
    if processes == 1:
        with pytest.raises(ValueError, match=message):
            run_config(*words)
    else:
        config = run_config(*words)
        config.check_capture("cuda", process_count=1)
        with pytest.raises(ValueError, match=message):
            config.check_capture("cuda", processes)
    config = run_config(*words, "trainer.capture=auto")
    world = World(size=processes, device=torch.device(config.trainer.device))
    assert re.match(problem, build.why_eager(config, nn.Identity(), 50, world))


REPEATED = (*NARROW_A2, "norm=std", "trainer.recompute=blocks")


@pytest.mark.parametrize(
    "options, processes, steps, reason",
    [
        ([], 1, 50, None),
        (["trainer.capture=true"], 2, 49, None),
        (["trainer.capture=false"], 1, 50, ""),
        ([], 2, 50, "2 processes were not measured with CUDA graphs (trainer.capture=true takes them)"),
        ([], 1, 49, "49 steps gain little (fewer than 50)"),
        (["trainer.profile=3"], 1, 50, "trainer.profile=3 shows the calls that a CUDA graph replaces"),
        ([*NARROW_A2, "trainer.recompute=activations"], 1, 50, None),  # its masks are kept
        (["norm=std", "trainer.recompute=blocks"], 1, 50, None),
        (
            *(REPEATED, 1, 50),
            "trainer.recompute=blocks repeats modules that draw random numbers (mod6.block1.convs.dropout, "
            "mod7.block1.convs.dropout)",
        ),
    ],
)
def test_auto_captures_where_that_pays(options, processes, steps, reason):
    config = run_config("trainer.device=cuda", *options)
    network = assemble.network_of(config, 5)
    assert build.why_eager(config, network, steps, World(0, processes, torch.device("cuda"))) == reason


class Fails(nn.Module):
    """Fails while a graph is captured, in the forward or in the backward pass."""

    def __init__(self, error: Exception, in_backward: bool = False):
        super().__init__()
        self.error = error
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_backward and x.requires_grad:
            x = x.clone()
            x.register_hook(self.fail)
        else:
            self.fail()
        return x

    def fail(self, *_: Tensor) -> None:
        if is_capturing():
            raise self.error


FAILURES = {
    "first": (0, Fails(WAITS), r"0\.0 \(Fails\) cannot be captured in a CUDA graph, .* \(operation not permitted .*\)"),
    "middle": (2, Fails(WAITS), r"2\.0 \(Fails\) cannot be captured"),
    "loss": (None, Fails(WAITS), "the network or its loss cannot be captured"),
    "backward": (2, Fails(WAITS, in_backward=True), r"2\.0 \(Fails\) cannot be captured"),
    "memory": (5, Fails(NO_MEMORY), "a CUDA graph needs more memory than there is"),
    "drawn": (2, nn.Dropout(0.5), r"the network draws random numbers on the CPU \(2\.0\), and a CUDA graph would"),
    "drawn in Python": (2, Draws(random.random), "the network draws random numbers on the CPU, and a CUDA graph would"),
    "drawn in NumPy": (2, Draws(lambda: float(np.random.rand())), "the network draws random numbers on the CPU"),
    "counted": (2, Counts(), r"factor of 2\.0 \(Counts\) changes from step to step, and a CUDA graph would"),
    "its own": (2, Fails(RuntimeError("no such size")), r"2\.0 \(Fails\) cannot be captured in a CUDA graph \(no such"),
    "new gradient": (4, Sometimes(), r"4\.weight has a gradient in some steps only"),
}


def loss_through(module: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    return CROSS_ENTROPY(module(logits), labels)


def failing_learner(place: str, captured: bool, precision: str = "float32") -> tuple[Learner, Loss]:
    number, failing, _ = FAILURES[place]
    module = copy.deepcopy(failing)
    learner = small_learner(captured, precision, module if number == 4 else None)
    if number in (0, 2, 5):
        learner.network[number] = nn.Sequential(module, learner.network[number])
    return learner, CROSS_ENTROPY if number is not None else partial(loss_through, module)


@pytest.mark.parametrize("place", [place for place in FAILURES if place not in ("memory", "counted")])
def test_what_cannot_be_captured_is_an_error_where_that_is_asked_for(place):
    learner, loss = failing_learner(place, captured=True)
    with pytest.raises(ValueError, match=f"^{FAILURES[place][2]}.*: {ADVICE}$"):
        losses_of(learner, 4, loss)


@pytest.mark.table
@pytest.mark.parametrize("place, precision", [*((place, "float32") for place in FAILURES), ("backward", "float16")])
def test_a_training_whose_capture_fails_goes_on_as_an_eager_one(place, precision, caplog):
    """To the bit, with two micro-batches a step and averaged weights."""
    states = []
    losses = []
    for captured in (False, True):
        learner, loss = failing_learner(place, captured, precision)
        learner.average = WeightAverage(learner.network, 0.9)
        if captured:
            learner.captured.requested = False
        losses.append(losses_of(learner, 8, loss))
        states.append({**learner.network.state_dict(), **learner.evaluated.network.state_dict(prefix="average.")})
    assert losses[0] == losses[1] and same(*states)
    assert learner.captured is None
    (message,) = (record.message for record in caplog.records if record.message.startswith("capture off"))
    assert re.match(f"capture off: {FAILURES[place][2]}.*; this run goes on eagerly$", message)


def test_numbers_that_change_are_captured_where_that_is_asked_for_with_one_warning(caplog):
    learner, loss = failing_learner("counted", captured=True)
    losses_of(learner, 8, loss)
    assert learner.captured.replay is not None
    (message,) = (record.message for record in caplog.records if "changes" in record.message)
    assert re.match(f"trainer.capture=true: {FAILURES['counted'][2]}", message)


def at_once(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A `Recorder` of nothing."""
    return lambda: None, function()


def problem_of(network: nn.Module, loss: nn.Module) -> str | None:
    """Why steps of a network are not captured, after three with two micro-batches each."""
    captured = CapturedMicroBatches(network, requested=False, record=at_once)
    x = torch.ones(2, 3)

    def micro_batch(images: Tensor, labels: Tensor) -> Tensor:
        value = (loss(network(images)) - labels).square().mean()
        value.backward()
        return value

    for _ in range(6):
        captured(micro_batch, x, x)
    return captured.problem


def counted(counts: Counts) -> None:
    type(counts).total += 1


STATES = {
    "switch": (False, lambda counts: setattr(counts, "state", not counts.state)),
    "of the class": (None, counted),
    "dictionary": ({"calls": 0}, lambda counts: counts.state.update(calls=counts.state["calls"] + 1)),
    "history": (deque(), lambda counts: counts.state.append(counts.first)),
    "object": (SimpleNamespace(calls=[0]), lambda counts: counts.state.calls.append(0)),
    "iterator": (itertools.count(), lambda counts: next(counts.state)),
    "NumPy's number": (np.int64(0), lambda counts: setattr(counts, "state", counts.state + 1)),
    "NumPy's array": (np.zeros(3), lambda counts: counts.state.__iadd__(1)),
    "scalar on the CPU": (torch.zeros(()), lambda counts: counts.state.add_(1)),
    "Python's generator": (random.Random(0), lambda counts: counts.state.random()),
    "NumPy's generator": (np.random.default_rng(0), lambda counts: counts.state.random()),
    "torch's generator": (torch.Generator(), lambda counts: torch.rand(1, generator=counts.state)),
    "hidden module": ([nn.Linear(1, 1)], lambda counts: counts.state[0].train(not counts.state[0].training)),
}


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_in_python_is_seen_in_the_network_and_in_its_loss(kind):
    counts = Counts(*STATES[kind])
    linear = nn.Linear(3, 3)
    for problem, place in (
        (problem_of(nn.Sequential(linear, counts), nn.Identity()), "1 (Counts)"),
        (problem_of(linear, counts), "loss (Counts)"),
    ):
        name = "total of class Counts" if kind == "of the class" else f"state of {place}"
        assert problem == f"{name} changes from step to step, and a CUDA graph would repeat its present value"


def test_what_ordinary_modules_change_is_no_reason_against_a_capture():
    """Buffers, what the first call sets, tensors in lists, random numbers, weights of parametrizations."""
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    system = Counts(random.SystemRandom(), lambda _: None)
    layers = parametrized, nn.BatchNorm1d(3), nn.Dropout(0.5), nn.RReLU(), system
    assert problem_of(nn.Sequential(*layers), nn.Identity()) is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_captured_training_is_freed_by_its_last_name_and_nothing_is_collected_while_it_is_captured(
    fails, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    network = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    watched = []
    collects = []

    def record(stream: None, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        collects.append(gc.isenabled())
        return at_once(function)

    def micro_batch(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        output = network(images)
        watched.append(weakref.ref(output))
        if fails:
            raise WAITS.with_traceback(None)
        return output.sum()

    monkeypatch.setattr(capture, "_cuda_graph", record)
    captured = CapturedMicroBatches(network, requested=False)
    captured.begin()
    watched += map(weakref.ref, (network, captured, captured.gradients))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(NotCaptured, match="operation not permitted") if fails else nullcontext():
            captured(partial(micro_batch, network), x, x)
        WAITS.__traceback__ = None  # this one outlives the capture
        del network, captured
        assert collects == [False] and len(watched) == 4 and not any(reference() for reference in watched)
    finally:
        gc.enable()


def gradients_of(rank: int, flat: bool) -> list[Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))
    learner = learner_of(network, accumulation_steps=2)
    world = World(rank, WORLD_SIZE)
    if flat:
        learner.captured = CapturedMicroBatches(network, record=recorded_on(network))
    else:
        learner.forward = forward_of(data_parallel(network, world.device), channels_last=False)
    for number in range(3):
        if flat and number == 2:
            learner.captured.begin()
        learner.captured.zero_gradients() if flat else learner.optimizer.zero_grad()
        accumulate_gradients(learner, CrossEntropy(), minibatch(2 * number + rank), 8, world)
    return [parameter.grad for parameter in network.parameters()]


def test_ranks_average_all_gradients_at_once_as_ddp_does(ranks):
    (flat, flat_of_second), (ddp, _) = ranks.run(gradients_of, True), ranks.run(gradients_of, False)
    assert all(map(torch.equal, flat, flat_of_second)) and all(map(torch.equal, flat, ddp))


@pytest.mark.parametrize("parts", [1, 2])
def test_plans_count_the_gradients_of_captured_steps_throughout(parts):
    """Gradients count once, also with two devices, where DDP would hold two copies during the second micro-batch."""
    words = ("body=resnext_tiny", "norm=std", "data.crop_size=96", f"trainer.accumulation_steps={parts}")
    config = run_config(*words, "trainer.device=cuda", "trainer.capture=true")
    trace = planner.step_memory(config, 4, 96, device_count=2)
    assert trace.at_peak["momentum"] <= trace.at_peak["gradients"] < 1.5 * trace.at_peak["momentum"]
