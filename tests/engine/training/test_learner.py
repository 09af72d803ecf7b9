"""The learner: its state survives a checkpoint, its numbers are checked, its statistics renewed."""

import functools

import pytest
import torch
from torch import nn

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.training import setup
from engine.training.learner import Learner, WeightAverage
from tests.engine.learners import forward_of
from tests.runs import one_epoch, run_config, same


def small_learner(precision: str = "float32", averaged: bool = False) -> Learner:
    """After two steps."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.named_parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "float16")
    average = WeightAverage(network, decay=0.9) if averaged else None
    learner = Learner(network, forward_of(network, precision), optimizer, scheduler, scaler, average=average)
    for _ in range(2):
        learner.backward(network(torch.randn(3, 2)).square().mean())
        learner.gradient_norm()
        learner.step(1.0)
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
    assert again.scaler.get_scale() == again.loss_scale == 32.0
    assert same(learner.network.state_dict(), again.network.state_dict())
    assert same(learner.average.module.state_dict(), again.average.module.state_dict())
    for one in (learner, again):
        with torch.no_grad():
            [parameter.add_(1) for parameter in one.network.parameters()]
        one.average.update(one.network)
    assert torch.equal(learner.average.module.weight, again.average.module.weight)
    assert not torch.equal(learner.average.module.weight, learner.network.weight)

    for one in (learner, again):  # with the momentum and the learning rate of the two steps
        one.optimizer.zero_grad()
        one.backward(one.network(torch.ones(3, 2)).square().mean())
        one.gradient_norm()
        one.step(1.0)
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
    for parameter in learner.network.parameters():
        parameter.grad = torch.full_like(parameter, 1e25)
    largest = r"all are finite; the gradient with the largest norm is weight \(2e\+25\)"  # whose square overflows
    with pytest.raises(FloatingPointError, match=f"the gradient is inf; {largest}"):
        learner.check(1.0, learner.gradient_norm().item())
    learner.network.bias.grad[0] = torch.nan
    learner.max_gradient_norm = 1.0  # which must not make NaN of all others
    with pytest.raises(FloatingPointError, match="the gradient is nan; 1 of 2 are not finite, bias first"):
        learner.check(1.0, learner.gradient_norm().item())


@pytest.mark.parametrize("part", ["network", "optimizer", "ema", "scaler"])
def test_a_state_without_a_part_is_refused(part):
    state = small_learner("float16", averaged=True).state_dict(2)
    del state[part]
    with pytest.raises(ValueError, match=f"it has no part '{part}'"):
        small_learner("float16", averaged=True).load_state_dict(state)


def test_a_state_of_another_network_is_refused():
    state = small_learner().state_dict(2)
    state["network"]["weight"] = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="it does not fit this run: .*Linear:[^$]*size mismatch for weight"):
        small_learner().load_state_dict(state)


def test_wrong_gradients_of_compiled_bfloat16_are_refused(monkeypatch):
    """TorchInductor computes them as PyTorch does."""
    monkeypatch.setattr("engine.training.setup.check_compiler", lambda *_, **__: None)
    config = run_config("body=resnext_small", "body.groups=4", "trainer.compile=true", "trainer.precision=bfloat16")
    make = functools.partial(assemble.segmentation_network, config, 5)
    with pytest.raises(ValueError, match="wrong gradients of body.mod4.block1.convs.conv2, a dilated"):
        setup.learner(config, make, one_epoch(10), World())


def test_momentum_of_parameters_in_another_order_is_refused():
    """States of the optimiser have no names of their own, and PyTorch loads them by position."""
    state = small_learner().state_dict(2)
    state["optimizer"]["param_groups"][0]["param_names"] = ["bias", "weight"]
    with pytest.raises(ValueError, match="it does not fit this run: its optimiser has parameters of other names"):
        small_learner().load_state_dict(state)
