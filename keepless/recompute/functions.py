"""Which functions write over their arguments, and which call others that a function mode can see."""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..inputs import tensors_in
from ..torch_internals import OpOverload, OpOverloadPacket, written_arguments

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
    return kwargs.get("out") is not None or writes(function)


def writes(function: Callable[..., Any]) -> bool:
    """Whether calls of a function may write over an argument, whatever they are given but `out`.

    Operators (`torch.ops`) declare all that they write over.
    """
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return bool(_written(function))
    return function in INPLACE or _writes(getattr(function, "__name__", ""))


@cache
def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in _OPERATORS
    return name.endswith("_") and name not in _OF_METADATA


@cache
def _written(operator: OpOverload | OpOverloadPacket) -> frozenset[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes over, in any of its overloads."""
    return frozenset(entry for overload in overloads_of(operator) for entry in written_arguments(overload))


def overloads_of(operator: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    return [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]


def overwritten(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that such a call may write over."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        written = _written(function)
        found: Any = [args[position] for position, _ in written if position < len(args)]
        found += [kwargs[name] for _, name in written if name in kwargs]
    else:
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Tensor) and "out" not in kwargs:
            return [first]
        found = (first, kwargs.get("out"))
    return tensors_in(found)


# With a function mode in effect these return True, and the function hands itself to the mode instead of running.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _calls_others(function: object) -> bool:
    return isinstance(function, FunctionType) and not {*_CHECKS}.isdisjoint(function.__code__.co_names)


CALL_OTHERS: frozenset[Callable[..., Any]] = frozenset(filter(_calls_others, vars(F).values()))


def body(function: FunctionType) -> FunctionType:
    """A function of `torch.nn.functional` that runs although a function mode is in effect, which sees inner calls.

    For arguments without a `__torch_function__` of their own.
    """
    names = function.__globals__ | dict.fromkeys(_CHECKS, _no)
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _no(*_: object) -> bool:
    return False
