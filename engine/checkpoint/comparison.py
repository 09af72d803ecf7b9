"""Compare a checkpoint with the state of this run before loading it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.torch_files import NOT_NEGATIVE, is_plain

_LARGEST = torch.finfo(torch.float32).max


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with an infinite or NaN value. Waits for their device once."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    good = torch.stack(finite).tolist() if finite else []
    return [name for name, is_good in zip(tensors, good, strict=True) if not is_good]


def check_tensors(part: str, given: object, wanted: Mapping[str, Tensor]) -> None:
    """ValueError unless `given` has the names, shapes and dtypes of `wanted`, and finite values."""
    if not isinstance(given, Mapping):
        raise ValueError(f"its part {part} is {type(given).__name__}: expected tensors by name")
    for name in wanted.keys() | given.keys():
        found, expected = (described(tensors.get(name)) for tensors in (given, wanted))
        if found != expected:
            raise ValueError(f"{name} of its part {part} is {found}: expected {expected}")
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if broken := not_finite(tensors):
        raise ValueError(f"{len(broken)} tensors of its part {part} are not finite, {broken[0]} among them")
    counts = {name: value for name, value in tensors.items() if name.endswith(NOT_NEGATIVE)}
    if negative := [name for name, value in counts.items() if (value < 0).any()]:
        raise ValueError(f"{negative[0]} of its part {part} has negative numbers")


def described(value: object) -> str:
    """dtype and shape of a tensor, for comparisons and messages; the type of another value; "missing" for None."""
    if value is None:
        return "missing"
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "" if is_plain(value) else " and not plain"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{kind}"


def number_in(part: str, values: object, key: str, like: float) -> Any:
    """A number in a part of a checkpoint. ValueError unless it has the type of `like`, is finite and not negative."""
    value = values.get(key) if isinstance(values, dict) else None
    if type(value) is not type(like) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{key} of its part {part} is {value!r}: expected a number from 0 on")
    return value
