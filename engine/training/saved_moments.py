"""Load what a checkpoint holds of an optimiser, once it fits the run: PyTorch itself takes any shape."""

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

OF_THE_RUN = ("params", "param_names", "lr", "initial_lr")  # entries of a group that do not come from the checkpoint


def load_moments(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Load an optimiser's state dict by its own `load_state_dict`. Learning rates stay.

    Fused kernels walk through a parameter and its moments alike: with another shape or stride they would read and write
    other memory. So moments get the layout that this optimiser gives them.

    ValueError: a parameter's entry is missing, or of another shape or dtype; names the parameter.
    """
    current = optimizer.state_dict()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    if names != [name for group in saved["param_groups"] for name in group["param_names"]]:
        raise ValueError("its optimiser has parameters of other names, or in another order")
    groups = [
        group | {key: value for key, value in saved_group.items() if key not in OF_THE_RUN}
        for group, saved_group in zip(current["param_groups"], saved["param_groups"], strict=True)
    ]
    initialised = current["state"].keys()  # before the first step; others get a state with their first gradient
    expected = current["state"] if {*range(len(names))} <= initialised else _states_after_a_step(optimizer)
    states = {**saved["state"]}
    for number, name in enumerate(names):
        if number in states or number in initialised:
            states[number] = _fitted_state(states.get(number, {}), expected.get(number, {}), name)
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
    for number, entry in optimizer.state_dict()["state"].items():
        if number in range(len(names)):
            entry.update(states.get(number, {}))  # PyTorch has given whole numbers the parameters' dtype


def _states_after_a_step(optimizer: Optimizer) -> dict[Any, Any]:
    """The states in an optimiser's state dict after a step with zeros for weights and gradients. The weights stay."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = torch.zeros_like(parameter)
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
            parameter.grad = None
    return optimizer.state_dict()["state"]


def _fitted_state(saved: Mapping[str, Any], expected: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """A parameter's saved state, in the tensors of its `expected` state. ValueError: an entry does not fit."""
    state = {**saved}
    for key, like in expected.items():
        if like is None and key in saved:
            continue
        value = saved.get(key)
        is_tensor = isinstance(like, Tensor)
        fits = _description(value) == _description(like) if is_tensor else type(value) is type(like)
        if key not in saved or not fits:
            actual = _description(value) if key in saved else "missing"
            raise ValueError(f"its optimiser's {key} of {parameter} is {actual}; expected {_description(like)}")
        if is_tensor:
            state[key] = like.copy_(value)
    return state


def _description(value: Any) -> str:
    """A tensor's dtype, shape and layout, or another value itself."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{value.dtype} {tuple(value.shape)}{layout}"
