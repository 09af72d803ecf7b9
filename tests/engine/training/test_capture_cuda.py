"""Captured trainings on a CUDA device against eager ones: `python -m pytest -m gpu` with this file.

With deterministic algorithms they are equal to the bit, with dropout too: a replay draws the numbers that eager steps
would. Without them PyTorch's kernels sum in any order, and weights may differ by `TOLERANCE` of what they have moved.
"""

import gc
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from engine import assemble
from engine.assemble.network import arithmetic
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.training import build
from engine.training.learner import Learner
from engine.training.loop import PLANNED_STEPS, train_step
from keepless import checking_repetitions
from keepless.torch_internals import is_capturing
from tests.cuda import NEEDS_CUDA, no_waits
from tests.engine.learners import minibatch
from tests.runs import NARROW_A2, SHORT, checked, one_epoch, run_config, same
from train_seg import train

pytestmark = [*NEEDS_CUDA, pytest.mark.usefixtures("sums_in_any_order_afterwards")]
CROPS, SIZE, CLASSES, STEPS = 4, 64, 5, 10
TOLERANCE = 0.02
SMALL = (
    *("body=resnext_tiny", "head.hidden_channels=8", "head.out_channels=8"),
    *(f"data.crops_per_minibatch={CROPS}", "norm.backend=auto", "optim.lr=1e-3"),
)
EXACT, EAGER = "trainer.deterministic=true", "trainer.capture=false"


@pytest.fixture
def sums_in_any_order_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


def learner_and_loss(*overrides: str) -> tuple[Learner, nn.Module]:
    config = run_config(*SHORT, *SMALL, *overrides, "trainer.device=cuda")
    arithmetic(config.trainer, fixed_sizes=True)
    learner = build.learner(config, CLASSES, one_epoch(50), World(device=torch.device("cuda")))
    return learner, assemble.loss(config.loss).cuda()


drawn = partial(minibatch, crops=CROPS, size=SIZE, device="cuda")


def trained(*overrides: str, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float], Learner]:
    """State, losses and learner after a short training."""
    learner, loss = learner_and_loss(*overrides)
    losses = []
    for number in range(steps):
        if learner.captured is not None and number == PLANNED_STEPS:
            learner.captured.begin()
        with checking_repetitions() if number < 2 else warnings.catch_warnings():
            outcome = train_step(learner, loss, drawn(number), CROPS, World(device=torch.device("cuda")))
        losses.append(learner.read(outcome)[0])
    assert learner.captured is None or learner.captured.replay is not None
    return {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}, losses, learner


def assert_equal(*overrides: str) -> None:
    eager, eager_losses, _ = trained(*overrides, EAGER)
    captured, captured_losses, _ = trained(*overrides, "trainer.capture=true")
    assert eager_losses == captured_losses
    different = [name for name in eager if not torch.equal(eager[name], captured[name])]
    assert not different


@pytest.mark.parametrize("precision, parts", [("float32", 1), ("float32", 2), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize("norm", ["std", "checkpoint", "checkpoint_xhat", "inplace", "inplace_1"])
def test_ten_steps_are_the_eager_ones_to_the_bit(norm, precision, parts):
    options = ("trainer.ema_decay=0.9", "optim.max_gradient_norm=1")
    words = (f"norm={norm}", f"trainer.precision={precision}", f"trainer.accumulation_steps={parts}", EXACT, *options)
    assert_equal(*words)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_without_deterministic_algorithms_they_are_close(precision, backend):
    words = ("norm=inplace", f"norm.backend={backend}", f"trainer.precision={precision}")
    (eager, *_), (captured, *_) = trained(*words, EAGER), trained(*words, "trainer.capture=true")
    start = learner_and_loss(*words)[0].network.state_dict()
    floating = [name for name, tensor in start.items() if tensor.is_floating_point() and "running" not in name]
    moved = torch.cat([(eager[name] - start[name]).flatten() for name in floating])
    apart = torch.cat([(eager[name] - captured[name]).flatten() for name in floating])
    assert 0 < moved.norm() and apart.norm() < TOLERANCE * moved.norm()


@pytest.mark.parametrize("recompute", ["activations", "blocks", "sqrt", "budget"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputed_parts_are_captured(recompute, precision):
    """Within a budget the third step's plan is captured."""
    budget = ("memory.activations=5MiB",) if recompute == "budget" else ()
    words = ("norm=std", f"trainer.recompute={recompute}", f"trainer.precision={precision}", EXACT, *budget)
    assert_equal(*words)


def test_reversible_bodies_are_captured_after_their_checked_repetitions():
    assert_equal("body=revnet_tiny", "norm=std", EXACT)


@pytest.mark.parametrize("recompute", ["none", "activations"])
def test_replays_draw_the_numbers_of_eager_steps(recompute):
    assert_equal(*NARROW_A2, "norm=inplace", f"trainer.recompute={recompute}", EXACT)


def test_blocks_that_draw_are_refused():
    words = (*NARROW_A2, "norm=std", "trainer.recompute=blocks", "trainer.capture=true")
    with pytest.raises(ValueError, match=r"^trainer.recompute=blocks runs .* \(body.mod6"):
        trained(*words)


class Ends(nn.Module):
    """Ends a capture: by reading a value, or as a module that finds no memory."""

    def __init__(self, error: Exception | None):
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if is_capturing() and self.error is not None:
            raise self.error
        return x if not is_capturing() or x.sum().item() > 0 else 2 * x


def test_a_body_that_reads_a_value_is_named():
    learner, loss = learner_and_loss("norm=std", "trainer.capture=true")
    learner.network.cls = nn.Sequential(Ends(None), learner.network.cls)
    world = World(device=torch.device("cuda"))
    train_step(learner, loss, drawn(0), CROPS, world)  # cuDNN chooses its algorithms
    learner.captured.begin()
    with pytest.raises(ValueError, match=r"^cls\.0 \(Ends\) cannot be captured .*: give trainer"):
        train_step(learner, loss, drawn(0), CROPS, world)


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no memory"), RuntimeError("of this test")])
def test_a_training_whose_capture_fails_goes_on_as_an_eager_one(error):
    """To the bit, with dropout after the failure; the next capture works, and no memory is lost."""
    words = (*NARROW_A2, "norm=inplace", EXACT, "trainer.ema_decay=0.9")
    states = []
    allocated = []
    device = torch.device("cuda")
    for capture in ("false", "auto"):
        learner, loss = learner_and_loss(*words, f"trainer.capture={capture}")
        learner.network.cls = nn.Sequential(Ends(error), learner.network.cls)
        for number in range(8):
            if learner.captured is not None and number == PLANNED_STEPS:
                learner.captured.begin()
            train_step(learner, loss, drawn(number), CROPS, World(device=device))
        assert learner.captured is None and torch.cuda.current_stream() == torch.cuda.default_stream()
        states.append({name: tensor.cpu() for name, tensor in learner.network.state_dict().items()})
        del learner, loss
        gc.collect()
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_reserved())
    assert same(*states)
    assert allocated[1] <= allocated[0] + 2**25  # workspaces of libraries on the capture's stream
    trained("norm=std", "trainer.capture=true")


def test_a_captured_step_waits_for_nothing_and_takes_the_eager_memory():
    """Gradients exist during the forward pass; eager ones are made in the backward pass."""
    peaks = []
    for capture in ("false", "true"):
        gc.collect()  # what an earlier test left would be freed meanwhile
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, _, learner = trained("norm=inplace", f"trainer.capture={capture}")
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients = sum(parameter.nbytes for parameter in learner.network.parameters())
    assert peaks[1] < 1.1 * peaks[0] + 2 * gradients + 2**20
    loss = assemble.loss(run_config().loss).cuda()
    crops = drawn(0)
    with no_waits():
        train_step(learner, loss, crops, CROPS, World(device=torch.device("cuda")))


def run(folder: Path, *overrides: str) -> dict[str, Tensor]:
    """The weights after a run of train_seg.py with an evaluation in the middle."""
    steps = ("trainer.steps=13", "trainer.evaluate_every_steps=6", "trainer.checkpoint_every_steps=6")
    words = (*SHORT, *SMALL, "norm=inplace", EXACT, *steps, *overrides, "trainer.device=cuda")
    train(checked("train_seg", f"run_dir={folder}", *words))
    return checkpoint.load(folder / "checkpoints" / "last.pt")["network"]


@pytest.mark.parametrize("first, then", [("true", "false"), ("false", "true"), ("true", "true")])
def test_a_run_continues_with_and_without_capture_to_the_same_bits(tmp_path, monkeypatch, first, then):
    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("engine.training.run.Run.evaluate", Mock(side_effect=KeyboardInterrupt))
        run(tmp_path / "run", f"trainer.capture={first}")
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == 6
    assert same(run(tmp_path / "run", f"trainer.capture={then}", "resume=auto"), whole)
