"""One training step: accumulation, precision, clipping, averaging and non-finite values."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.checkpoint.run_directory import RunDirectory
from engine.process.distributed import World
from engine.process.stopping import Preempted
from engine.segmentation.cross_entropy import CrossEntropy
from engine.training.learner import Learner, WeightAverage
from engine.training.loop import _raise_better, train_step
from keepless import InPlaceABN
from tests.cuda import NEEDS_CUDA, no_waits
from tests.engine.learners import learner_of, minibatch
from tests.host_reads import host_reads
from tests.runs import run_config


def step(learner: Learner) -> tuple[float, float]:
    outcome = train_step(learner, CrossEntropy(fraction=0.25), minibatch(), minibatch_size=4, world=World())
    loss, norm, *_ = learner.read(outcome)
    return loss, norm


def test_accumulation_gives_the_step_of_the_whole_minibatch():
    """The network has no norms: their batch statistics are of one part at a time."""
    weights = []
    for parts in (1, 2, 3, 4):  # three have 2, 1 and 1 crops
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 3, padding=1)
        loss, _ = step(learner_of(network, accumulation_steps=parts))
        weights.append((loss, network.weight.detach()))
    for loss, weight in weights[1:]:
        assert loss == pytest.approx(weights[0][0], rel=1e-6)
        torch.testing.assert_close(weight, weights[0][1], rtol=0, atol=1e-7)


def test_logits_are_freed_before_the_backward_pass_reaches_the_network():
    """They take hundreds of MB with the paper's classes and crops. The mean, as a loss, does not need them."""
    freed = []

    def loss(logits, labels):
        seen = weakref.ref(logits)
        value = logits.mean()
        value.register_hook(lambda gradient: freed.append(seen() is None))
        return value

    train_step(learner_of(nn.Conv2d(3, 5, 1)), loss, minibatch(), minibatch_size=4, world=World())
    assert freed == [True]


@pytest.mark.parametrize("requested", [False, True])
def test_a_step_that_fails_after_a_request_to_stop_is_a_stop(requested):
    """Signals of a scheduler end the compilers that a step has started; what is not finite stays an error."""
    run = SimpleNamespace(
        learner=learner_of(nn.Conv2d(3, 5, 1)),
        config=None,
        stop=SimpleNamespace(requested=requested),
        world=World(),
    )
    crops = {"image": torch.zeros(2, 3, 4, 4), "name": ["a", "b"]}
    for error in (RuntimeError("C++ compile error"), ValueError("cannot compile")):
        expected = (Preempted, "stopped in step 3, which did not end") if requested else (type(error), str(error))
        with pytest.raises(expected[0], match=expected[1].replace("+", r"\+")):
            _raise_better(error, 3, crops, run)
            raise error


@pytest.mark.parametrize("captured", [None, "a graph"])
def test_a_step_that_runs_out_of_memory_is_told_what_its_graph_takes(captured):
    learner = replace(learner_of(nn.Conv2d(3, 5, 1)), captured=captured)
    run = SimpleNamespace(learner=learner, config=run_config(), stop=SimpleNamespace(requested=False), world=World())
    with pytest.raises(MemoryError, match="out of memory in step 3 with 2 crops of 4x4 pixels at a time") as error:
        _raise_better(
            torch.OutOfMemoryError("no memory"), 3, {"image": torch.zeros(2, 3, 4, 4), "name": ["a", "b"]}, run
        )
    assert ("trainer.capture=false saves what a CUDA graph adds" in str(error.value)) is (captured is not None)


def test_float16_leaves_steps_out_and_scales_down_until_it_gives_up():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1))
    network[1].register_full_backward_hook(lambda layer, dx, dy: (dx[0] * torch.inf,))
    before = network[0].weight.detach().clone()
    learner = learner_of(network, precision="float16")
    for _ in range(29):  # 2^16 is halved at every step
        step(learner)
    assert torch.equal(network[0].weight, before) and learner.scaler.get_scale() == 2.0**-13
    step(learner)
    with pytest.raises(FloatingPointError, match="the gradient is"):
        step(learner)


def test_clipping_scales_longer_gradients_down_to_the_norm():
    gradients = []
    for longest in (None, 1e9, 0.01):
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 1)
        _, norm = step(learner_of(network, max_gradient_norm=longest))
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    whole, kept, clipped = gradients
    assert norm == pytest.approx(whole.norm().item()) and norm > 0.01
    assert torch.equal(kept, whole)
    torch.testing.assert_close(clipped, whole * (0.01 / norm))


@pytest.mark.parametrize("low_precision", ["bfloat16", "float16"])
def test_low_precision_steps_as_float32_does(low_precision):
    steps = []
    for precision in ("float32", low_precision):
        torch.manual_seed(0)
        network = nn.Conv2d(3, 5, 3, padding=1)
        before = network.weight.detach().clone()
        step(learner_of(network, precision=precision))
        steps.append(network.weight.detach() - before)
    assert 0 < (steps[1] - steps[0]).norm() < 1e-2 * steps[0].norm()


def test_averaged_weights_follow_the_recursion():
    """average <- decay * average + (1 - decay) * weights, starting from the weights after the first step."""
    network = nn.Conv2d(3, 5, 1)
    average = WeightAverage(network, decay=0.75)
    learner = learner_of(network, average=average)
    expected = None
    for _ in range(4):
        step(learner)
        weights = network.weight.detach().clone()
        expected = weights if expected is None else 0.75 * expected + 0.25 * weights
    torch.testing.assert_close(learner.evaluated.network.weight, expected, rtol=1e-6, atol=1e-7)


def learner_with_everything(precision: str, device: str = "cpu") -> Learner:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), InPlaceABN(8), nn.Conv2d(8, 5, 1)).to(device)
    options = {"accumulation_steps": 2, "max_gradient_norm": 1.0, "average": WeightAverage(network, decay=0.9)}
    return learner_of(network, precision=precision, device=device, **options)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_step_waits_for_nothing_and_is_read_at_once(precision):
    learner = learner_with_everything(precision)
    step(learner)
    crops = minibatch()
    with host_reads() as reads:
        outcome = train_step(learner, CrossEntropy(fraction=0.25), crops, 4, World())
        assert not reads
        learner.read(outcome)
    assert len(reads) == 1 and "read: Tensor.tolist" in reads[0]


def test_an_optimiser_that_cannot_skip_a_step_waits_for_the_flag():
    learner = learner_of(nn.Conv2d(3, 5, 1), fused=False)
    crops = minibatch()
    with host_reads() as reads:
        train_step(learner, CrossEntropy(), crops, 4, World())
    assert len(reads) == 1 and "learner.py" in reads[0]


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=NEEDS_CUDA) for name in ("float32", "bfloat16", "float16")]
)
def test_a_step_on_a_gpu_waits_for_nothing(precision):
    learner = learner_with_everything(precision, "cuda")
    crops = minibatch(device="cuda")
    arguments = (learner, CrossEntropy(fraction=0.25), crops, 4, World(device=torch.device("cuda")))
    for _ in range(3):
        train_step(*arguments)
    with no_waits():
        train_step(*arguments)


def test_a_save_waits_for_the_device_once(tmp_path):
    """It must see that all numbers are finite. The thread that writes the copies waits for them."""
    learner = learner_with_everything("float32")
    directory = RunDirectory(str(tmp_path))
    step(learner)
    with host_reads() as reads:
        directory.start_saving(learner.state_dict(1))
    directory.finish_saving()
    assert len(reads) == 1 and "not_finite: Tensor.tolist" in reads[0]
