"""What a checkpoint holds of an optimiser and a loss scaler, compared with the run: PyTorch itself takes any shape."""

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.assemble.optimization import states_after_a_step

OF_THE_RUN = ("params", "param_names", "lr", "initial_lr")  # entries of a group that do not come from the checkpoint


def load_moments(saved: Mapping[str, Any], optimizer: Optimizer, steps: int) -> None:
    """Load an optimiser's state dict by its own `load_state_dict`. Learning rates stay.

    Fused kernels walk through a parameter and its moments alike: with another shape or stride they would read and write
    other memory. So moments get the layout that this optimiser gives them. `steps`: how many the checkpoint has taken.

    ValueError: an entry is missing, unknown, not finite, or of another shape or dtype; names the parameter.
    """
    current = optimizer.state_dict()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    if names != [name for group in saved["param_groups"] for name in group["param_names"]]:
        raise ValueError("its optimiser has parameters of other names, or in another order")
    groups = [
        group | {key: value for key, value in saved_group.items() if key in group and key not in OF_THE_RUN}
        for group, saved_group in zip(current["param_groups"], saved["param_groups"], strict=True)
    ]
    initialised = {*current["state"]}  # before the first step; other parameters get a state with their first gradient
    expected = current["state"] if {*range(len(names))} <= initialised else states_after_a_step(optimizer)
    states = {**saved["state"]}
    for key in states:
        if key not in expected and key not in range(len(names)):
            raise ValueError(f"its optimiser has an entry {key!r}; expected one for each of {len(names)} parameters")
    for number, name in enumerate(names):
        if number in states or number in initialised:
            most = steps if number in initialised else None
            states[number] = _fitted_state(states.get(number, {}), expected.get(number, {}), name, most)
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
    for number, entry in optimizer.state_dict()["state"].items():
        if number in range(len(names)):
            entry.update(states.get(number, {}))  # PyTorch has given whole numbers the parameters' dtype


def _fitted_state(
    saved: Mapping[str, Any], expected: Mapping[str, Any], parameter: str, most: int | None
) -> dict[str, Any]:
    """A parameter's saved state, in the tensors of its `expected` state. ValueError: see `load_moments`.

    most: steps, of an optimiser that makes its whole state before the first; None: more may come later.
    """
    state = {**saved}
    for key in sorted(expected.keys() if most is None else expected.keys() | saved.keys(), key=str):
        name = f"its optimiser's {key} of {parameter}"
        if key not in expected:
            raise ValueError(f"{name} is unknown; expected {', '.join(sorted(expected)) or 'no state'}")
        if key not in saved:
            raise ValueError(f"{name} is missing")
        value, like = saved[key], expected[key]
        if isinstance(like, Tensor):
            fits = _description(value) == _description(like)
        else:
            fits = like is None or type(value) is type(like)
        if not fits:
            raise ValueError(f"{name} is {_description(value)}; expected {_description(like)}")
        if isinstance(like, Tensor):
            is_count = key == "step" and most is not None
            is_finite = bool((value.isfinite() | ~like.isfinite()).all())
            if not is_finite or (is_count and not 0 <= value <= most):
                limit = f", at most {most}, as the checkpoint has taken" if is_count else ""
                raise ValueError(f"{name} is {reprlib.repr(value.tolist())}; expected finite numbers{limit}")
            state[key] = like.copy_(value)
    return state


def _description(value: Any) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{value.dtype} {tuple(value.shape)}{layout}"


def check_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> None:
    """Raise ValueError unless `saved` is a state of this scaler: a finite scale above 0, the same factors."""
    fixed = scaler.state_dict()
    scale, tracker = (saved[name] for name in ("scale", "_growth_tracker"))
    fits = type(scale) is float and 0 < scale < float("inf") and type(tracker) is int and tracker >= 0
    if not fits or {**fixed, "scale": scale, "_growth_tracker": tracker} != saved:
        raise ValueError(f"its loss scaler is {dict(saved)}; expected a scale above 0, and otherwise {fixed}")
