"""The learner: its state survives a checkpoint, its numbers are checked, its statistics renewed."""

import copy
import functools

import pytest
import torch
from torch import nn

from engine.checkpoint import files as checkpoint
from engine.distributed import World
from engine.learner import Learner, WeightAverage
from models.layers import InPlaceABN
from tests.engine.learners import forward_of, learner_of
from tests.runs import same


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


def test_before_an_evaluation_the_average_gets_statistics_of_its_own():
    """From the given minibatches; without any, the trained network's statistics stay."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.9), InPlaceABN(4))
    minibatches = [{"image": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)} for _ in range(3)]
    learner = learner_of(network, average=WeightAverage(network, decay=0.9), statistics_minibatches=minibatches)
    with torch.no_grad():
        learner.average.module[0].weight.mul_(2)
        outputs = [learner.average.module[0](learner.forward.normalised(m["image"])) for m in minibatches]
    before = copy.deepcopy(network.state_dict())
    learner.prepare_evaluation(World())
    means = [y.transpose(0, 1).flatten(1).mean(dim=1) for y in outputs]
    torch.testing.assert_close(learner.average.module[2].running_mean, sum(means) / 3)
    assert same(network.state_dict(), before)
    learner.statistics_minibatches = ()
    renewed = learner.average.module[2].running_mean.clone()
    learner.prepare_evaluation(World())
    assert torch.equal(learner.average.module[2].running_mean, renewed)


GONE = object()


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("optimizer", GONE, "it has no part optimizer"),
        ("ema", GONE, "it has no part ema"),
        ("scaler", GONE, "it has no part scaler"),
        ("scheduler", [], "its part scheduler is list: expected dict"),
        ("scaler scale", GONE, "its part scaler has no scale"),
        ("scheduler last_epoch", 7, "its learning rate schedule is at step 7"),
        ("network bias", GONE, "bias of its part network is missing: expected .2."),
        ("network more", torch.zeros(2), "more of its part network is .2.: expected missing"),
        ("ema weight", torch.zeros(3, 2), "weight of its part ema is .3, 2.: expected .2, 2."),
        ("ema bias", torch.full((2,), torch.nan), "1 tensors of its part ema are not finite, bias"),
        ("network bias", torch.full((2,), torch.inf), "1 tensors of its part network are not finite, bias"),
        ("optimizer state 0 momentum_buffer", torch.zeros(1), r"optimizer \(weight\) is .1.: expected .2, 2."),
        ("optimizer state 5", {}, "momentum for parameter 5 of 2"),
        ("optimizer param_groups 0 param_names", ["bias", "weight"], "belongs to other parameters"),
        ("optimizer param_groups", [], "other groups of parameters"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(path, value, message):
    """torch would load momentum of any shape and read beyond its memory in the next step."""
    given, learner = small_learner("float16", averaged=True).state_dict(2), small_learner("float16", averaged=True)
    state = copy.deepcopy(given)
    *parts, last = (int(part) if part.isdecimal() else part for part in path.split())
    part = functools.reduce(lambda part, name: part[name], parts, state)
    if value is GONE:
        del part[last]
    else:
        part[last] = value
    before = copy.deepcopy(learner.state_dict(2))
    with pytest.raises(ValueError, match=message):
        learner.load_state_dict(state)
    assert torch.equal(before["network"]["weight"], learner.network.weight)
    del given["optimizer"]["param_groups"][0]["param_names"]  # as earlier versions wrote it
    learner.load_state_dict(given)
    assert torch.equal(given["network"]["weight"], learner.network.weight)
    momentum = learner.optimizer.state[learner.network.weight]["momentum_buffer"]
    assert torch.equal(momentum, given["optimizer"]["state"][0]["momentum_buffer"])
