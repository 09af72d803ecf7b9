"""Every optimiser that steps by gradients trains, is planned, saved and resumed, without a word about its states."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine import assemble
from engine.assemble.optimization import lr_schedule
from engine.schema.optim import Optim, Poly
from engine.training.learner import Learner
from engine.training.planner import FakeTensors, fake_step
from tests.engine.learners import forward_of
from tests.runs import SHORT, one_epoch, run_config


class Signs(Optimizer):
    """Like Lion (Chen et al., 2023). It counts in whole numbers and in its groups, and makes a state in step 2."""

    def __init__(self, params, lr, beta):
        super().__init__(params, {"lr": lr, "beta": beta, "shrinks": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["shrinks"] *= 0.9
            group["step"] = group.get("step", 0) + 1  # which begins with the first step
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {"mean": torch.zeros_like(parameter), "calls": 0, "counted": torch.tensor(0)}
                state["calls"] += 1
                state["counted"] += 1
                if state["calls"] == 2:
                    state["early"] = parameter.clone()
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                change = state["mean"].sign() + state.get("early", 0) * state["counted"] / state["calls"]
                parameter.sub_(change, alpha=group["lr"] * group["shrinks"])


def choice_of(kind: type[Optimizer], **keys: Any) -> Optim:
    @dataclass
    class Own(Optim):
        name: str = "own"
        builds: ClassVar[type] = kind

        def more(self) -> dict[str, Any]:
            return keys

    return Own(lr=0.01)


# Not for trainings: LBFGS needs a closure, SparseAdam sparse gradients.
KINDS = {
    name: (kind, {})
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
}
KINDS |= {"SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}), "own": (Signs, {"beta": 0.9})}


def learner_of(kind: type[Optimizer], keys: dict[str, Any], fused: bool) -> Learner:
    """Of a small network; one of its parameters never gets a gradient."""
    torch.manual_seed(0)
    matrices = [nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)]
    convolution = [nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last), nn.BatchNorm2d(4)]
    network = nn.Sequential(*(matrices if kind.__name__ == "Muon" else convolution))
    network.unused = nn.Parameter(torch.ones(2, 3))
    optimizer = assemble.optimizer(replace(choice_of(kind, **keys), fused=fused), network, ())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Learner(network, forward_of(network), optimizer, lr_schedule(Poly(), optimizer, one_epoch(8)), scaler)


def train(learner: Learner, first: int, last: int) -> None:
    for number in range(first, last):
        learner.optimizer.zero_grad()
        inputs = torch.randn(2, 3, 5, 5 if len(learner.parameters) > 3 else 3, generator=torch.manual_seed(number))
        learner.network(inputs).square().mean().backward()
        learner.step(*torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_training_is_equal_to_the_bit(name, fused):
    whole, before, after = (learner_of(*KINDS[name], fused) for _ in range(3))
    train(whole, 0, 6)
    for first, step in ((0, 3), (3, 5)):  # it resumes twice
        train(before, first, step)
        file = io.BytesIO()
        torch.save(before.state_dict(step), file)
        file.seek(0)
        after.load_state_dict(torch.load(file, weights_only=True))
        before, after = after, learner_of(*KINDS[name], fused)
    train(before, 5, 6)
    state = before.state_dict(6)
    expected = whole.state_dict(6)
    torch.testing.assert_close(state["network"], expected["network"], rtol=0, atol=0)
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    moments, expected_moments = (content["optimizer"]["state"] for content in (state, expected))
    torch.testing.assert_close(moments, expected_moments, rtol=0, atol=0)  # and dtypes
    assert [[*keys] for keys in moments.values()] == [[*keys] for keys in expected_moments.values()]


def after_20_steps(optimizer_of: Callable[[nn.Module], Optimizer]) -> Tensor:
    """x², from x = 2."""
    holder = nn.Module()
    holder.x = nn.Parameter(torch.full((2, 2), 2.0))
    optimizer = optimizer_of(holder)
    for _ in range(20):
        optimizer.zero_grad()
        holder.x.square().sum().backward()
        optimizer.step()
    return holder.x.detach().square()


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_pytorch_s_own(name):
    """Rprop begins with the learning rate for a step size; from zeros it would go nowhere."""
    kind, keys = KINDS[name]
    of_assemble = after_20_steps(lambda network: assemble.optimizer(choice_of(kind, **keys), network, ()))
    decay = {} if kind in (Signs, torch.optim.Rprop) else {"weight_decay": 1e-4}
    of_pytorch = after_20_steps(lambda network: kind(network.parameters(), lr=0.01, **decay, **keys))
    torch.testing.assert_close(of_assemble, of_pytorch, rtol=1e-6, atol=0)  # ours may be fused


@pytest.mark.parametrize("name", ["ASGD", "Adafactor", "NAdam"])  # they read numbers of their states, or of weights
def test_a_plan_has_the_bytes_of_its_states(name):
    config = run_config("body=resnext_tiny", "norm=std", *SHORT)
    config.optim = choice_of(*KINDS[name][:1])
    with FakeTensors():
        learner, *_, resident = fake_step(config, 2, 64)
    parameters = [nn.Parameter(torch.zeros(parameter.shape)) for parameter in learner.parameters]
    optimizer = KINDS[name][0](parameters, lr=0.01)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert resident["momentum"] == sum(v.nbytes for state in optimizer.state.values() for v in state.values())


def test_one_that_needs_a_closure_is_refused_by_name():
    with pytest.raises(ValueError, match="^optim=own: LBFGS.step needs a closure that computes the loss again"):
        assemble.optimizer(choice_of(torch.optim.LBFGS), nn.Linear(2, 2), ())
