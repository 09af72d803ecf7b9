"""Which tensors a call may write over."""

import inspect
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...inputs import tensors_in
from ...torch_internals import OpOverload, OpOverloadPacket, written_arguments

_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul div truediv floordiv mod pow and or xor lshift rshift matmul".split()
) | {"__setitem__"}
_OF_METADATA = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])

INPLACE: dict[Callable[..., Any], int] = {  # position of the argument `inplace`
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}
_SETTERS: frozenset[Any] = frozenset([Tensor.real.__set__, Tensor.imag.__set__])  # type: ignore[attr-defined]
# Of functions whose schema says nothing else, the first argument may be written. It is compared by identity.
_FIRST_ALONE = frozenset([(0, "")])


def may_overwrite(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call may write over its arguments or `out`, judging by its name, arguments and schema.

    Not the running statistics of batch norms, whose versions stay: `is_simple` in passes/packing.py.
    """
    position = INPLACE.get(function)
    if position is not None:
        return bool(kwargs.get("inplace") or (position < len(args) and args[position]))
    if function is F.embedding:  # it writes over rows of the weight
        return (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None
    return may_write(function) != NEVER or kwargs.get("out") is not None


NEVER, MAYBE, FIRST = range(3)  # whether calls of a function write over tensors; FIRST: always over the first one


@cache
def may_write(function: Callable[..., Any]) -> int:
    """Whether calls of a function may write over tensors, besides `out`: `NEVER`, `MAYBE` or `FIRST`."""
    if function is F.embedding or function in INPLACE or function in _SETTERS:
        return MAYBE
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return MAYBE if _overwritten_arguments(function) else NEVER
    name = getattr(function, "__name__", "")
    if name in _OF_METADATA:
        return NEVER
    is_dunder = name.startswith("__")
    if name in _OPERATORS or (not is_dunder and (name.endswith("_") or _declared_by(name))):
        return FIRST if _overwritten_arguments(function) is _FIRST_ALONE else MAYBE
    return NEVER


@cache
def _declared_by(name: str) -> frozenset[tuple[int, str]]:
    """What PyTorch's operator with this name writes over, e.g. `fused_moving_avg_obs_fake_quant`; no outputs."""
    operator = getattr(torch.ops.aten, name, None)
    overloads = overloads_of(operator) if isinstance(operator, OpOverloadPacket) else []
    return _overwritten_by([overload for overload in overloads if "out" not in str(overload)])


def _overwritten_by(overloads: list[OpOverload]) -> frozenset[tuple[int, str]]:
    return frozenset(argument for overload in overloads for argument in written_arguments(overload))


@cache
def _overwritten_arguments(function: Callable[..., Any]) -> frozenset[tuple[int, str]]:
    """Positions and names of the arguments that a function may write over: if nothing else is known, the first."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return _overwritten_by(overloads_of(function))
    if function is F.embedding:
        return frozenset([(1, "weight")])
    if not isinstance(function, BuiltinFunctionType):
        return _FIRST_ALONE
    declared = _declared_by(function.__name__)
    return declared if any(position > 0 for position, _ in declared) else _FIRST_ALONE


def overloads_of(operator: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    if isinstance(operator, OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def overwritten(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call may write over, if `may_overwrite` is true for it."""
    parameters = _overwritten_arguments(function)
    if parameters is _FIRST_ALONE and args and isinstance(args[0], Tensor) and "out" not in kwargs:
        return [args[0]]
    arguments: list[Any] = [args[position] for position, _ in parameters if position < len(args)]
    arguments += [kwargs[name] for _, name in parameters if name in kwargs]
    if parameters is _FIRST_ALONE:  # without a schema, all named arguments may be written: in `nn.init` it is `tensor`
        arguments += [kwargs.get("out")] if args else kwargs.values()
    return tensors_in(arguments)
