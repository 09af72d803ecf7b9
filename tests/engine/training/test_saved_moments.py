"""A checkpoint's moments fit their parameters, or are refused by name: fused kernels would read other memory."""

import copy

import pytest
import torch
from torch import nn

from engine.training.saved_moments import check_scaler, fitting_moments, state_of

SIZE = (2, 3, 1, 4)


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    """Of a weight in channels-last and a bias, after two steps."""
    parameters = {"conv.weight": torch.randn(SIZE).to(memory_format=torch.channels_last), "conv.bias": torch.randn(2)}
    named = [(name, nn.Parameter(tensor)) for name, tensor in parameters.items()]
    sgd = kind == "sgd"
    optimizer = torch.optim.SGD(named, momentum=0.9) if sgd else torch.optim.AdamW(named)
    for _ in range(2):
        for _, parameter in named:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_moments_are_copied_into_their_parameters_layout(kind):
    optimizer = optimizer_of(kind)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    name = "momentum_buffer" if kind == "sgd" else "exp_avg_sq"
    values = saved[0][name]
    saved[0][name] = values.contiguous()
    saved[1][name] = torch.ones(1).expand(2)
    fitting = fitting_moments(saved, optimizer, steps=2)
    assert fitting.keys() == saved.keys() and fitting[0].keys() == saved[0].keys()
    assert torch.equal(fitting[0][name], values) and fitting[0][name].stride() == values.stride()
    assert fitting[1][name].stride() == (1,) and torch.equal(fitting[1][name], torch.ones(2))
    without = torch.optim.SGD([("conv.bias", nn.Parameter(torch.ones(2)))])
    assert not fitting_moments({}, without, steps=2)


def test_a_parameter_that_never_had_a_gradient_has_an_entry_of_its_own():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("used", used), ("unused", unused)], momentum=0.9)
    used.grad = torch.ones(2)
    optimizer.step()
    saved = state_of(optimizer)["state"]
    assert saved[1] == {"updated": False} and fitting_moments(saved, optimizer, steps=1)[1] == {}
    with pytest.raises(ValueError, match="momentum_buffer of unused is missing"):
        fitting_moments({0: saved[0]}, optimizer, steps=1)


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
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    saved[0][name] = REFUSED[message]
    if REFUSED[message] is None:
        del saved[0][name]
    with pytest.raises(ValueError, match=rf"^its optimiser's {name} of conv.weight ") as error:
        fitting_moments(saved, optimizer, steps=2)
    assert message in str(error.value)


def test_an_entry_too_few_or_too_many_and_a_wrong_count_of_steps_are_refused():
    optimizer = optimizer_of("adamw")
    good = optimizer.state_dict()["state"]
    for saved, message in (
        ({0: good[0]}, "its optimiser's exp_avg of conv.bias is missing"),
        ({**good, 7: good[0]}, "its optimiser has an entry 7; expected one for each of 2 parameters"),
        ({**good, "a": good[0]}, "its optimiser has an entry 'a'"),
        ({**good, 1: {**good[1], "momentum_buffer": 0}}, "momentum_buffer of conv.bias is unknown; expected exp_avg,"),
        ({**good, 1: {**good[1], "step": torch.tensor(3.0)}}, "step of conv.bias is 3; expected at most 2"),
        ({**good, 1: {**good[1], "step": torch.tensor(torch.nan)}}, "step of conv.bias is nan; expected at most 2"),
        ({**good, 1: {**good[1], "step": torch.ones(1)}}, r"step of conv.bias is torch.float32 \(1,\); expected"),
    ):
        with pytest.raises(ValueError, match=message):
            fitting_moments(saved, optimizer, steps=2)


@pytest.mark.parametrize(
    "name, values", {"scale": [0.0, -1.0, torch.inf, torch.nan, "x", 7], "growth_factor": [8.0]}.items()
)
def test_a_loss_scale_that_no_run_has_is_refused(name, values):
    scaler = torch.amp.GradScaler("cpu")
    check_scaler({**scaler.state_dict(), "scale": 1.5, "_growth_tracker": 3}, scaler)
    for value in values:
        with pytest.raises(
            ValueError, match=f"^its loss scaler is .*'{name}': {value!r}.*; expected a scale above 0, and"
        ):
            check_scaler({**scaler.state_dict(), name: value}, scaler)
