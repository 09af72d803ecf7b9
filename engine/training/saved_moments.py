"""What a checkpoint holds of an optimiser and a loss scaler, compared with the run: PyTorch itself takes any shape."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

NOT_UPDATED = {"updated": False}  # the entry of a parameter that had no gradient, or whose steps float16 has skipped


def expected_moments(optimizer: Optimizer) -> set[str]:
    """The names of an optimiser's state of each parameter."""
    if isinstance(optimizer, AdamW):
        return {"step", "exp_avg", "exp_avg_sq"}
    return {"momentum_buffer"} if optimizer.defaults.get("momentum") else set()


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser's state dict, in which no parameter lacks an entry."""
    state = optimizer.state_dict()
    if expected_moments(optimizer):
        for number in range(sum(len(group["params"]) for group in optimizer.param_groups)):
            state["state"].setdefault(number, dict(NOT_UPDATED))
    return state


def fitting_moments(saved: Mapping[int, Mapping[str, Any]], optimizer: Optimizer, steps: int) -> dict[int, dict]:
    """The saved state of an optimiser, by its parameters' positions, on their devices and in their memory layout.

    Fused kernels walk through a parameter and its moments alike: with another shape or stride they would read and write
    other memory. `steps`: how many the checkpoint has taken.

    ValueError: an entry is missing, unknown, or of another shape or dtype; names the parameter.
    """
    expected = expected_moments(optimizer)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [key for key in saved if key not in range(len(names))]:
        raise ValueError(f"its optimiser has an entry {strange[0]!r}; expected one for each of {len(names)} parameters")
    fitting: dict[int, dict] = {number: {} for number in range(len(names) if expected else 0)}
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        entry = saved.get(number, {})
        if entry == NOT_UPDATED:
            continue
        for part in sorted(expected | entry.keys(), key=str):
            what = f"its optimiser's {part} of {name}"
            if part not in expected:
                raise ValueError(f"{what} is unknown; expected {', '.join(sorted(expected)) or 'no state'}")
            if part not in entry:
                raise ValueError(f"{what} is missing")
            fitting[number][part] = _like(parameter, entry[part], what, steps if part == "step" else None)
    return fitting


def _like(parameter: nn.Parameter, value: Any, what: str, steps: int | None) -> Tensor:
    """A copy of a moment in the layout of its parameter, or of a count of at most `steps`. ValueError: see above."""
    shape, dtype = (parameter.shape, parameter.dtype) if steps is None else (torch.Size(), torch.float32)
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.layout) != (shape, dtype, torch.strided):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{what} is {found}; expected {dtype} {tuple(shape)}")
    if steps is None:
        return torch.empty_like(parameter, requires_grad=False).copy_(value)
    if not 0 <= value.item() <= steps:
        raise ValueError(f"{what} is {value.item():g}; expected at most {steps}, the steps of the checkpoint")
    return value


def check_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> None:
    """Raise ValueError unless `saved` is a state of this scaler: a finite scale above 0, the same factors."""
    free = ("scale", "_growth_tracker")
    fixed = {name: value for name, value in scaler.state_dict().items() if name not in free}
    scale, tracker = (saved[name] for name in free)
    fits = type(scale) is float and 0 < scale < float("inf") and type(tracker) is int and tracker >= 0
    if not fits or any(saved[name] != value for name, value in fixed.items()):
        raise ValueError(f"its loss scaler is {dict(saved)}; expected a scale above 0, and {fixed}")
