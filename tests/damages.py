"""What may become of a value in a checkpoint that somebody has crafted, or that was damaged."""

import copy
import functools

import torch

GONE = object()  # no value at all


def damages(value: object) -> list[object]:
    """Values of other types, dtypes, shapes and ranges."""
    wrong: list[object] = [GONE, None, "text", b"", [], {}, -1, 1e300, True, torch.nan, torch.zeros(1)]
    if isinstance(value, torch.Tensor):
        wrong += [value.double(), value.bool(), value[..., None], value.to("meta"), value + 1j, value.flatten()[:0]]
        if value.is_floating_point():
            wrong += [torch.full_like(value, torch.nan), torch.full_like(value, torch.inf)]
            wrong += [value.to_sparse() if value.dim() else value.half()]
            wrong.append(torch.quantize_per_tensor(value, 0.1, 0, torch.quint8))
    if isinstance(value, dict):
        wrong += [{**value, "more": 1}, {-1: value}]
    if isinstance(value, list):
        wrong += [value * 2, [value]]
    if isinstance(value, (int, float)):
        wrong += [100 * value + 1, -value - 1, str(value)]
    return wrong


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in nested containers."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [place for key, entry in entries for place in places(entry, (*path, key))]
    return [path, *below] if path else below


def at(value: object, place: tuple) -> object:
    """The value at a path."""
    return functools.reduce(lambda part, name: part[name], place, value)


def damaged(value: object, place: tuple, damage: object) -> object:
    """A copy with another value at a path."""
    copied = copy.deepcopy(value)
    part = at(copied, place[:-1])
    if damage is GONE:
        del part[place[-1]]
    else:
        part[place[-1]] = damage
    return copied
