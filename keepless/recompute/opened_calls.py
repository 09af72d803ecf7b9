"""Functions written in Python, run so that a function mode sees the functions that they call."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

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
