"""The learner: its state survives a checkpoint, its numbers are checked, its statistics renewed."""

import copy
import math

import pytest
import torch
from torch import nn

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.training import build
from engine.training.learner import Learner, WeightAverage
from engine.training.planner import FakeTensors
from keepless.made_tensors import MadeTensors
from tests.engine.learners import forward_of
from tests.runs import one_epoch, run_config, same


def small_learner(precision: str = "float32", averaged: bool = False) -> Learner:
    """A learner of a linear layer that has taken two steps."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.named_parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "float16")
    average = WeightAverage(network, decay=0.9) if averaged else None
    learner = Learner(network, forward_of(network, precision), optimizer, scheduler, scaler, average=average)
    for _ in range(2):
        learner.scaler.scale(network(torch.randn(3, 2)).square().mean()).backward()
        learner.step(*torch.zeros(2, dtype=torch.float64))
    return learner


def test_everything_that_changes_continues(tmp_path):
    assert not {"scaler", "ema"} & small_learner().state_dict(2).keys()
    learner = small_learner("float16", averaged=True)
    learner.scaler.update(32.0)
    state = learner.state_dict(2)
    assert state["step"] == 2 and state["ema"].keys() == state["network"].keys()
    checkpoint.save(tmp_path / "last.pt", state)

    again = small_learner("float16", averaged=True)
    again.load_state_dict(checkpoint.read(tmp_path / "last.pt"))
    assert again.scaler.get_scale() == 32.0
    assert same(learner.network.state_dict(), again.network.state_dict())
    assert same(learner.average.module.state_dict(), again.average.module.state_dict())
    for continued in (learner, again):
        with torch.no_grad():
            [parameter.add_(1) for parameter in continued.network.parameters()]
        continued.average.update(continued.network, torch.tensor(True))
    assert torch.equal(learner.average.module.weight, again.average.module.weight)
    assert not torch.equal(learner.average.module.weight, learner.network.weight)

    for continued in (learner, again):  # with the momentum and the learning rate of the two steps
        continued.optimizer.zero_grad()
        continued.scaler.scale(continued.network(torch.ones(3, 2)).square().mean()).backward()
        continued.step(*torch.zeros(2, dtype=torch.float64))
    assert torch.equal(learner.network.weight, again.network.weight)
    assert learner.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"] < 0.1 * 0.8


def test_a_broken_network_or_average_has_no_state_and_a_gradient_that_overflows_is_named():
    learner = small_learner(averaged=True)
    for module, name in ((learner.average.module, "averaged weight"), (learner.network, "weight")):
        module.weight.data[0, 0] = torch.nan
        expected = f"^after step 7, 1 weights and statistics are not finite, {name} among them"
        with pytest.raises(FloatingPointError, match=expected):
            learner.state_dict(7)
        module.weight.data[0, 0] = 0
    for name, value in (("weight", 1e25), ("bias", torch.nan)):  # the first one's square overflows
        for parameter in learner.network.parameters():
            parameter.grad = torch.ones_like(parameter)
        getattr(learner.network, name).grad.view(-1)[0] = value
        outcome = learner.step(*torch.zeros(2, dtype=torch.float64))
        learner.optimizer.zero_grad()
        with pytest.raises(FloatingPointError, match=rf"is (inf|nan); 1 of 2 are not finite, {name} first"):
            learner.read(outcome)


def one_step(learner: Learner, value: float) -> None:
    learner.optimizer.zero_grad()
    for parameter in learner.network.parameters():
        parameter.grad = torch.full_like(parameter, value)
    learner.step(torch.tensor(1.0 if math.isfinite(value) else value, dtype=torch.float64), torch.zeros(()).double())


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_that_is_not_finite_changes_no_weight_or_moment(optim, fused, first):
    """PyTorch initialises the momentum in the first step, which may be the bad one."""
    learners = []
    for bad in (False, True):
        torch.manual_seed(0)
        network = nn.Linear(2, 2)
        config = run_config(f"optim={optim}", f"optim.fused={fused}").optim
        optimizer = assemble.optimizer(config, network, ())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        learner = Learner(network, forward_of(network), optimizer, scheduler, scaler)
        for value in (*([] if first else [1.0]), *([torch.inf, torch.nan] if bad else []), 2.0, 3.0):
            one_step(learner, value)
        learners.append(learner)
    clean, with_bad = learners
    assert same(clean.network.state_dict(), with_bad.network.state_dict())
    for of_clean, of_bad in zip(*(learner.optimizer.state.values() for learner in learners), strict=True):
        assert same(of_clean, of_bad)


def test_an_average_stays_after_a_step_of_float16_that_is_not_finite():
    learner = small_learner("float16", averaged=True)
    before = copy.deepcopy(learner.average.module)
    one_step(learner, torch.inf)
    assert same(before.state_dict(), learner.average.module.state_dict())
    one_step(learner, 1.0)
    expected = torch.lerp(before.weight, learner.network.weight, 1 - 0.9)
    assert torch.equal(learner.average.module.weight, expected) and not torch.equal(before.weight, expected)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_an_average_on_a_card_needs_a_copy_of_all_weights_in_float16_alone():
    with FakeTensors():  # nothing runs on it
        network = nn.Linear(100, 100, device="cuda")
        average = WeightAverage(network, decay=0.9)
        peaks = []
        average.update(network)
        for finite in (None, torch.ones((), dtype=torch.bool, device="cuda")):
            with MadeTensors() as tensors:
                average.update(network, finite)
            peaks.append(tensors.peak)
    assert peaks[0] == 0 and peaks[1] >= sum(parameter.nbytes for parameter in network.parameters())


def test_a_state_of_another_network_or_with_its_parameters_in_another_order_is_refused():
    """States of the optimiser have no names of their own, and PyTorch loads them by position."""
    state = small_learner().state_dict(2)
    state["optimizer"]["param_groups"][0]["param_names"] = ["bias", "weight"]
    with pytest.raises(ValueError, match="it does not fit this run: its optimiser has parameters of other names"):
        small_learner().load_state_dict(state)
    state["optimizer"]["param_groups"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match="it does not fit this run: "):
        small_learner().load_state_dict(state)
    state["network"]["weight"] = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="it does not fit this run: .*Linear:[^$]*size mismatch for weight"):
        small_learner().load_state_dict(state)
    state = small_learner("float16", averaged=True).state_dict(2)
    state["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match="its optimiser's momentum_buffer of weight is torch.float32 .3,.; expected"):
        small_learner("float16", averaged=True).load_state_dict(state)


def test_wrong_gradients_of_compiled_bfloat16_are_refused(monkeypatch):
    """TorchInductor computes them as PyTorch does."""
    monkeypatch.setattr("engine.training.build.check_compiler", lambda *_, **__: None)
    config = run_config("body=resnext_small", "body.groups=4", "trainer.compile=true", "trainer.precision=bfloat16")
    with pytest.raises(ValueError, match="wrong gradients of body.mod4.block1.convs.conv2, a dilated"):
        build.learner(config, 5, one_epoch(10), World())


def test_layers_without_gradients_are_refused_where_ranks_would_wait_for_them(monkeypatch):
    config = run_config("run_dir=unused", "norm.backend=eager", "head.hidden_channels=8")
    network = assemble.network_of(config, 5)
    network.head.reads = (4,)
    assert network.unread_feature == "mod5"
    monkeypatch.setattr(build, "network_of", lambda *_: network)
    with pytest.raises(ValueError, match="no head reads mod5, the last feature of the body"):
        build.learner(config, 5, one_epoch(2), World(size=2))
