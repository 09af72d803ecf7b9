"""Calls that write over memory: over which arguments, and what becomes of the values there."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, UntypedStorage

from ..inputs import tensors_in
from ..saved import ByStorage, Kept
from ..torch_internals import Hooks, OpOverload, OpOverloadPacket, written_arguments
from .values import Memory, Value

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


class _Overwriting(NamedTuple):
    """A call that may write over a tensor."""

    tensor: Tensor
    storage: UntypedStorage
    version: int  # before
    memory: Memory
    copied: list[tuple[Value, Kept, int]]  # values that have copies meanwhile, with their sources and storages


def before_overwriting(tensor: Tensor, memories: ByStorage[Memory], outer: Hooks | None) -> _Overwriting | None:
    """Copy the values in a tensor's memory that recipes read. None if nothing depends on it.

    `memories`: those in which values are kept. `outer`: hooks that get the copies.
    """
    storage = tensor.untyped_storage()
    memory = memories.pop(storage)
    if memory is None:
        return None
    write = _Overwriting(tensor, storage, tensor._version, memory, [])
    for value in filter(None, (reference() for reference in memory.values)):
        if value.may_be_read() and isinstance(kept := value.source, Kept) and not kept.is_modified():
            write.copied.append((value, kept, value.storage))
            value.source, value.storage = Kept(kept.get().clone(), outer), 0
    return write


def after_overwriting(write: _Overwriting, memories: ByStorage[Memory]) -> None:
    """Mark the tensors that operations saved as overwritten; or undo the copies, if nothing was written."""
    memory: Memory | None = write.memory
    if write.tensor._version != write.version:
        while memory is not None:
            memory.overwritten, memory = True, memory.earlier
        return
    for value, source, storage in write.copied:
        value.source, value.storage = source, storage
    now = memories.get(write.storage) or memories.put(write.storage, write.memory)
    if now is not write.memory:
        now.values += write.memory.values
        now.earlier = write.memory
