"""Values of a forward pass that its backward pass reads: kept, or computed again from others."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .saved import Kept


class Value:
    """A tensor of the forward pass, for the operations and recipes that read it in a backward pass.

    It is computed again (or unpacked) once per backward pass: for its first reader, and held until the last has read.
    """

    __slots__ = ("__weakref__", "computed", "overwritten", "readers", "reads", "saved", "source", "storage")

    def __init__(self, source: "Kept | Recipe", storage: int = 0):
        self.source = source
        self.storage = storage  # of a kept tensor
        self.saved = False  # by an operation
        self.overwritten = False  # after that
        self.readers = 0
        self.reads = 0  # since it was computed
        self.computed: Tensor | None = None

    @property
    def depth(self) -> int:
        """The number of recipes between this value and kept ones."""
        return self.source.depth if isinstance(self.source, Recipe) else 0

    def add_reader(self) -> None:
        self.readers += 1
        if self.readers == 1 and isinstance(self.source, Recipe):
            for value in self.source.inputs():
                value.add_reader()

    def remove_reader(self) -> None:
        self.readers -= 1
        if self.readers == 0 and isinstance(self.source, Recipe):
            for value in self.source.inputs():
                value.remove_reader()

    def become(self, recipe: "Recipe") -> None:
        """Forget the tensor, or how it would have been computed: it will be computed by this recipe."""
        before, self.source = self.source, recipe
        if self.readers:
            for value in recipe.inputs():
                value.add_reader()
            for value in before.inputs() if isinstance(before, Recipe) else ():
                value.remove_reader()

    def reads_storage(self, storage: int) -> bool:
        """Whether it is kept in some memory, or computed from something that is."""
        seen: set[Value] = set()
        values = [self]
        while values:
            value = values.pop()
            if isinstance(value.source, Recipe):
                values += [other for other in value.source.inputs() if other not in seen]
                seen.update(value.source.inputs())
            elif value.storage == storage:
                return True
        return False

    def get(self) -> Tensor:
        """The tensor. RuntimeError if it, or something that it is computed from, was modified in place."""
        if self.overwritten:
            raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
        if isinstance(self.source, Kept) and self.source.hooks is None:
            return self.source.get()
        tensor = self.source.get() if self.computed is None else self.computed
        self.reads += 1
        self.computed = tensor if self.reads < self.readers else None
        if self.computed is None:
            self.reads = 0
        return tensor


class Recipe:
    """How to compute a value again: `function(*arguments)`, where some arguments are `Value`s or `Kept`."""

    __slots__ = ("arguments", "autocast", "depth", "device", "function", "new", "overwrites", "stride")

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: Sequence[Any],
        like: Tensor,
        *,
        new: bool = False,
        overwrites: bool = False,
    ):
        """`like`: the value. A function that returns another memory layout has its result copied into this one.

        `new`: the function's result never shares memory with its arguments. `overwrites`: the function is elementwise
        and takes `inplace=True`, which is used where nobody else reads its first argument.
        """
        self.function = function
        self.arguments = tuple(arguments)
        self.device = like.device.type
        self.stride = like.stride()
        self.autocast = _autocast(self.device)
        self.depth = 1 + max([value.depth for value in self.inputs()], default=0)
        self.new = new
        self.overwrites = overwrites

    def inputs(self) -> list[Value]:
        return [argument for argument in self.arguments if isinstance(argument, Value)]

    def get(self) -> Tensor:
        options = {"inplace": True} if self.overwrites and _is_spare(self.arguments[0]) else {}
        arguments = [a.get() if isinstance(a, (Value, Kept)) else a for a in self.arguments]
        enabled, dtype = self.autocast
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            with (
                torch.autocast(self.device, dtype, enabled)
                if _autocast(self.device) != self.autocast
                else nullcontext()
            ):
                return laid_out(self.function(*arguments, **options), self.stride)


def _is_spare(argument: object) -> bool:
    """Whether a recipe's argument is computed for this recipe alone, in memory of its own."""
    if not isinstance(argument, Value) or argument.readers != 1:
        return False
    return isinstance(argument.source, Recipe) and argument.source.new


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor with these strides: itself, or a copy."""
    if all(
        ours == wanted or size == 1 for ours, wanted, size in zip(tensor.stride(), stride, tensor.shape, strict=True)
    ):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _autocast(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is enabled for a type of device, and its dtype then."""
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return True, torch.get_autocast_dtype(device)
    return False, None


@cache
def _has_autocast(device: str) -> bool:
    """Not e.g. meta."""
    return torch.amp.is_autocast_available(device)
