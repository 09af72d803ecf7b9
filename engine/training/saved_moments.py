"""What a checkpoint holds of an optimiser and a loss scaler, compared with the run: PyTorch itself takes any shape."""

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def load_moments(saved: Mapping[str, Any], optimizer: Optimizer, steps: int) -> None:
    """Copy the state of each parameter in an optimiser's state dict into the optimiser's, which has all of them.

    Fused kernels walk through a parameter and its moments alike: with another shape or stride they would read and write
    other memory. `steps`: how many the checkpoint has taken.

    ValueError: an entry is missing, unknown, not finite, or of another shape or dtype; names the parameter.
    """
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    if names != [name for group in saved["param_groups"] for name in group["param_names"]]:
        raise ValueError("its optimiser has parameters of other names, or in another order")
    if strange := [key for key in saved["state"] if key not in range(len(names))]:
        raise ValueError(f"its optimiser has an entry {strange[0]!r}; expected one for each of {len(names)} parameters")
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        own, entry = optimizer.state.get(parameter, {}), saved["state"].get(number, {})
        for part in sorted(own.keys() | entry.keys(), key=str):
            what = f"its optimiser's {part} of {name}"
            if part not in own:
                raise ValueError(f"{what} is unknown; expected {', '.join(sorted(own)) or 'no state'}")
            if part not in entry:
                raise ValueError(f"{what} is missing")
            value, expected = entry[part], _kind(own[part])
            if _kind(value) != expected:
                raise ValueError(f"{what} is {_kind(value)}; expected {expected}")
            if not value.isfinite().all() or (part == "step" and not 0 <= value <= steps):
                most = f", at most {steps}, as the checkpoint has taken" if part == "step" else ""
                raise ValueError(f"{what} is {reprlib.repr(value.tolist())}; expected finite numbers{most}")
            own[part].copy_(value)


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
