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
    own = optimizer.state_dict()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    if names != [name for group in saved["param_groups"] for name in group["param_names"]]:
        raise ValueError("its optimiser has parameters of other names, or in another order")
    groups = [
        group | {key: value for key, value in before.items() if key in group and key not in OF_THE_RUN}
        for group, before in zip(own["param_groups"], saved["param_groups"], strict=True)
    ]
    is_made = {*own["state"]}  # before the first step; else a parameter gets its state with its first gradient
    made = own["state"] if {*range(len(names))} <= is_made else states_after_a_step(optimizer)
    states = {**saved["state"]}
    if strange := [key for key in states if key not in made and key not in range(len(names))]:
        raise ValueError(f"its optimiser has an entry {strange[0]!r}; expected one for each of {len(names)} parameters")
    for number, name in enumerate(names):
        if number in states or number in is_made:
            most = steps if number in is_made else None
            states[number] = _checked(states.get(number, {}), made.get(number, {}), name, most)
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
    for number, entry in optimizer.state_dict()["state"].items():
        if number in range(len(names)):
            entry.update(states.get(number, {}))  # PyTorch has given whole numbers the parameters' dtype


def _checked(entry: Mapping[str, Any], own: Mapping[str, Any], name: str, most: int | None) -> dict[str, Any]:
    """A parameter's saved state, in the tensors of its `own`. ValueError: see `load_moments`.

    most: steps, of an optimiser that makes its whole state before the first; None: more may come later.
    """
    found = {**entry}
    for part in sorted(own.keys() | entry.keys() if most is not None else own.keys(), key=str):
        what = f"its optimiser's {part} of {name}"
        if part not in own:
            raise ValueError(f"{what} is unknown; expected {', '.join(sorted(own)) or 'no state'}")
        if part not in entry:
            raise ValueError(f"{what} is missing")
        value, like = entry[part], own[part]
        if not (_kind(value) == _kind(like) if isinstance(like, Tensor) else type(value) is type(like) or like is None):
            raise ValueError(f"{what} is {_kind(value)}; expected {_kind(like)}")
        if isinstance(like, Tensor):
            is_count = part == "step" and most is not None
            if not (value.isfinite() | ~like.isfinite()).all() or (is_count and not 0 <= value <= most):
                limit = f", at most {most}, as the checkpoint has taken" if is_count else ""
                raise ValueError(f"{what} is {reprlib.repr(value.tolist())}; expected finite numbers{limit}")
            found[part] = like.copy_(value)
    return found


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    return f"{value.dtype} {tuple(value.shape)}" + f" {value.layout}" * (value.layout != torch.strided)


def check_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> None:
    """Raise ValueError unless `saved` is a state of this scaler: a finite scale above 0, the same factors."""
    fixed = scaler.state_dict()
    scale, tracker = (saved[name] for name in ("scale", "_growth_tracker"))
    fits = type(scale) is float and 0 < scale < float("inf") and type(tracker) is int and tracker >= 0
    if not fits or {**fixed, "scale": scale, "_growth_tracker": tracker} != saved:
        raise ValueError(f"its loss scaler is {dict(saved)}; expected a scale above 0, and otherwise {fixed}")
