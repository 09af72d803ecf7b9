"""Compare a checkpoint's content with what this run would save, before anything of it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_NOT_NEGATIVE = ("running_var", "num_batches_tracked", "exp_avg_sq", "step")  # ends of names


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with an infinite or NaN value. Waits for their device once."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    good = torch.stack(finite).tolist() if finite else []
    return [name for name, is_good in zip(tensors, good, strict=True) if not is_good]


def is_plain(value: object) -> bool:
    """Whether a value is a tensor of ordinary numbers: not sparse, quantised, complex, or without memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.is_complex())


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
    counts = {name: value for name, value in tensors.items() if name.endswith(_NOT_NEGATIVE)}
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


def moved(name: str, given: object, own: object, moving: tuple[str, ...] = (), key: str = "") -> Any:
    """A copy of `own`, in which the numbers below the keys `moving` are those of `given`.

    Private keys are `own`'s unless they move, because they change with PyTorch's version; so are keys that `given`
    lacks. ValueError: another value differs; or a number that moves is missing, negative, not finite, of another type.
    """
    if isinstance(own, dict):
        if not isinstance(given, dict):
            raise ValueError(f"its part {name} is {type(given).__name__}: expected dict")
        if absent := [entry for entry in moving if entry in own and entry not in given]:
            raise ValueError(f"its part {name} has no {absent[0]}")
        return {
            entry: moved(f"{name}.{entry}", given[entry], value, moving, entry)
            if entry in given and (entry in moving or not entry.startswith("_") or entry == "_schedulers")
            else value
            for entry, value in own.items()
        }
    if isinstance(own, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(own):
            raise ValueError(f"its part {name} is {given!r}: expected a list of {len(own)}")
        return type(own)(moved(name, *both, moving, key) for both in zip(given, own, strict=True))
    if key not in moving:
        if not isinstance(given, (bool, int, float, str, type(None))) or given != own:
            raise ValueError(f"its part {name} is {given!r}: expected {own!r}")
        return own
    if type(given) is not type(own) or not isinstance(given, (int, float)) or not 0 <= given <= _LARGEST:
        raise ValueError(f"its part {name} is {given!r}: expected a number from 0 on")
    return given
