"""Which calls write over their arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
) | {"__setitem__"}
_ALWAYS, _NEVER = -1, 1000

INPLACE: dict[Callable[..., Any], int] = {  # position of the argument `inplace`
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}


def may_overwrite(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes over its first argument or `out`, as far as its name and arguments tell."""
    position = INPLACE.get(function)
    if position is None:
        name = getattr(function, "__name__", "")
        ends = name.endswith("_") and not name.endswith("__")
        position = INPLACE[function] = _ALWAYS if ends or name in _OPERATORS else _NEVER
    if position is _ALWAYS or "out" in kwargs:
        return True
    return bool(kwargs.get("inplace") or (position < len(args) and args[position]))


def overwritten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that such a call may write over."""
    first = args[0] if args else kwargs.get("input")
    if isinstance(first, Tensor) and "out" not in kwargs:
        return [first]
    return [tensor for tensor in tree_leaves((first, kwargs.get("out"))) if isinstance(tensor, Tensor)]
