"""A checkpoint's moments fit their parameters, or are refused by name: fused kernels would read other memory."""

import copy

import pytest
import torch
from torch import nn

from engine.assemble import optimization as assemble
from engine.training.saved_moments import load_moments
from tests.runs import run_config

SIZE = (2, 3, 1, 4)


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    """Two steps were taken on a channels-last weight and a bias; a third parameter never had a gradient."""
    network = nn.Module()
    network.weight = nn.Parameter(torch.randn(SIZE).to(memory_format=torch.channels_last))
    network.bias = nn.Parameter(torch.randn(2))
    network.unused = nn.Parameter(torch.ones(3))
    optimizer = assemble.optimizer(run_config(f"optim={kind}").optim, network, ())
    for _ in range(2):
        for parameter in (network.weight, network.bias):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_moments_are_copied_into_their_parameters_layout(kind):
    saved = copy.deepcopy(optimizer_of(kind).state_dict())
    optimizer = optimizer_of(kind)
    name = "momentum_buffer" if kind == "sgd" else "exp_avg_sq"
    values = saved["state"][0][name]
    saved["state"][0][name] = values.contiguous()
    saved["state"][1][name] = torch.ones(1).expand(2)
    assert kind == "adamw" or not saved["state"][2][name].any()
    load_moments(saved, optimizer)
    loaded = optimizer.state_dict()["state"]
    assert torch.equal(loaded[0][name], values) and loaded[0][name].stride() == values.stride()
    assert loaded[1][name].stride() == (1,) and torch.equal(loaded[1][name], torch.ones(2))
    without = assemble.optimizer(run_config("optim.momentum=0").optim, nn.Linear(1, 1), ())
    load_moments(without.state_dict(), without)
    assert not without.state


REFUSED = {
    "is torch.float32 (3,); expected torch.float32 (2, 3, 1, 4)": torch.zeros(3),
    "is torch.float32 (3, 2, 1, 4); expected": torch.zeros(3, 2, 1, 4),
    "is torch.float32 (); expected": torch.tensor(0.0),
    "is torch.int64 (2, 3, 1, 4); expected": torch.zeros(SIZE, dtype=torch.int64),
    "is torch.float64 (2, 3, 1, 4); expected": torch.zeros(SIZE, dtype=torch.float64),
    "is 0.5; expected": 0.5,
    "is missing": None,
}


@pytest.mark.parametrize("kind, name", [("sgd", "momentum_buffer"), ("adamw", "exp_avg"), ("adamw", "exp_avg_sq")])
@pytest.mark.parametrize("message", REFUSED)
def test_a_moment_of_another_kind_is_refused_by_name(kind, name, message):
    optimizer = optimizer_of(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][name] = REFUSED[message]
    if REFUSED[message] is None:
        del saved["state"][0][name]
    with pytest.raises(ValueError, match=rf"^its optimiser's {name} of weight ") as error:
        load_moments(saved, optimizer)
    assert message in str(error.value)


def test_an_entry_too_few_and_a_count_of_steps_of_another_shape_are_refused():
    optimizer = optimizer_of("adamw")
    good = optimizer.state_dict()["state"]
    for changed, message in (
        ({1: {}}, "its optimiser's step of bias is missing"),
        ({1: {**good[1], "step": torch.ones(1)}}, r"step of bias is torch.float32 \(1,\); expected"),
    ):
        with pytest.raises(ValueError, match=message):
            load_moments({**optimizer.state_dict(), "state": {**good, **changed}}, optimizer)
