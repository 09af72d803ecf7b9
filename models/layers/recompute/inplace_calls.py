"""Which calls write over their arguments."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
) | {"__setitem__"}
_OF_METADATA = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])

INPLACE: dict[Callable[..., Any], int] = {  # position of the argument `inplace`
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}


def may_overwrite(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes over its first argument or `out`, as far as its name and arguments tell."""
    if (position := INPLACE.get(function)) is not None:
        return bool(kwargs.get("inplace") or (position < len(args) and args[position]))
    return kwargs.get("out") is not None or _writes(getattr(function, "__name__", ""))


@cache
def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in _OPERATORS
    return name.endswith("_") and name not in _OF_METADATA


def overwritten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that such a call may write over."""
    first = args[0] if args else kwargs.get("input")
    out = kwargs.get("out")
    if isinstance(first, Tensor) and out is None:
        return [first]
    return [tensor for tensor in tree_leaves((first, out)) if isinstance(tensor, Tensor)]
