"""Compare a checkpoint's content with what this run would save, before anything of it is loaded."""

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


def with_progress(name: str, given: object, own: object, progress: tuple[str, ...] = (), key: str = "") -> Any:
    """A copy of `own` with the numbers that change in training, under the keys `progress`, taken from `given`.

    Everything else must be equal, except private keys, which differ between versions of PyTorch, and keys that `given`
    lacks. ValueError if it is not, or if a number of `progress` is missing, negative, not finite or of another type.
    """
    if isinstance(own, dict):
        if not isinstance(given, dict):
            raise ValueError(f"its part {name} is {type(given).__name__}: expected dict")
        if absent := [entry for entry in progress if entry in own and entry not in given]:
            raise ValueError(f"its part {name} has no {absent[0]}")
        return {
            entry: with_progress(f"{name}.{entry}", given[entry], value, progress, entry)
            if entry in given and (entry in progress or not entry.startswith("_") or entry == "_schedulers")
            else value
            for entry, value in own.items()
        }
    if isinstance(own, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(own):
            raise ValueError(f"its part {name} is {given!r}: expected a list of {len(own)}")
        return type(own)(with_progress(name, *both, progress, key) for both in zip(given, own, strict=True))
    if key not in progress:
        if not isinstance(given, (bool, int, float, str, type(None))) or given != own:
            raise ValueError(f"its part {name} is {given!r}: expected {own!r}")
        return own
    if type(given) is not type(own) or not isinstance(given, (int, float)) or not 0 <= given <= _LARGEST:
        raise ValueError(f"its part {name} is {given!r}: expected a number from 0 on")
    return given
