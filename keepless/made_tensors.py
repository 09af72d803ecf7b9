"""Count the bytes of tensors, real or fake, from allocation to release."""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import tensors_in
from .torch_internals import (
    OpOverload,
    TorchDispatchMode,
    address,
    engine_adds,
    has_storage,
    node_number,
    running_node,
)


class Change(NamedTuple):
    """Memory of a tensor, allocated or freed."""

    number: int  # counts the allocations
    bytes: int  # negative if freed
    place: str  # where in the program


class MadeTensors(TorchDispatchMode):
    """Context that counts the bytes of the tensors made in it, real or fake, while they exist.

    Tensors that autograd and checkpointing keep for the backward pass count too.

    Where branches meet, a backward pass adds one gradient into the memory of the other, if nothing else holds it, such
    as the base of a view. Under a dispatch mode like this one it makes a new tensor instead; it is counted as if the
    addition were in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0  # bytes that exist now, and the most so far
        self.changes: list[Change] = []  # every allocation and release, in order
        self.sizes: list[int] = []  # bytes of each allocation
        self.alive: dict[int, _Allocation] = {}  # of memory that exists, by address
        self._sum: _Sum | None = None

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        argument_addresses = set(map(address, _storages((args, kwargs))))
        previous_peak = self.peak
        self._sum = None
        result = self.call(function, args, kwargs or {})
        for storage in _storages(result):
            if address(storage) not in argument_addresses and address(storage) not in self.alive:
                self.count_storage(storage)
        if function is torch.ops.aten.add.Tensor and engine_adds() and self._could_be_in_place(args[0], result):
            gradient, total = map(address, _storages([args[0], result]))
            self._sum = _Sum(gradient, total, len(self.changes), previous_peak)
        return result

    def call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run an operator."""
        return function(*args, **kwargs)

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, if it was made in this context and still exists."""
        allocation = self.alive.get(address(tensor.untyped_storage()))
        return None if allocation is None else allocation.number

    def _could_be_in_place(self, gradient: Tensor, result: Any) -> bool:
        """Whether autograd without modes would add to the gradient in place, if nothing else holds it."""
        allocation = self.alive.get(address(gradient.untyped_storage()))
        if allocation is None or torch.is_grad_enabled() or gradient._is_view():
            return False
        node = running_node()
        following = getattr(node, "next_functions", ())
        if allocation.node == _node_identity(node) and len(set(following)) == len(following):
            return False  # the addition is part of a node
        is_alike = (gradient.shape, gradient.dtype) == (result.shape, result.dtype)
        return is_alike and torch.ops.aten.is_non_overlapping_and_dense(gradient)

    def place(self) -> str:
        """Where the program is, e.g. in the backward pass."""
        return ""

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        storage_address = address(storage)
        size = storage.nbytes()
        number = len(self.sizes)
        reference = weakref.ref(storage, partial(self._count_release, storage_address))
        self.alive[storage_address] = _Allocation(number, _node_identity(running_node()), reference)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.sizes.append(size)
        self.note(Change(number, size, self.place()))

    def _count_release(self, storage_address: int, _: object) -> None:
        number = self.alive.pop(storage_address).number
        addition = self._sum
        if addition is not None and addition.gradient == storage_address and addition.changes == len(self.changes):
            self.bytes -= self.take_back().bytes
            self.peak = addition.peak
            self.alive[addition.result] = self.alive[addition.result]._replace(number=number)
        else:
            size = self.sizes[number]
            self.bytes -= size
            self.note(Change(number, -size, self.place()))

    def note(self, change: Change) -> None:
        """Record that memory has been allocated or freed."""
        self.changes.append(change)

    def take_back(self) -> Change:
        """Undo the last allocation: the addition was in place, see the class."""
        return self.changes.pop()


class _Allocation(NamedTuple):
    """Memory of a tensor that exists."""

    number: int  # counts the allocations
    node: object  # of the backward pass that allocated it
    reference: weakref.ref  # calls `_count_release` when it is freed


class _Sum(NamedTuple):
    """An addition that has just made a tensor, and would be in place if nothing else holds its first argument."""

    gradient: int  # address
    result: int  # address
    changes: int  # number of changes so far
    peak: int  # before the addition


def _node_identity(node: Any) -> object:
    """Identify a node of a backward pass without keeping it alive."""
    return None if node is None else node_number(node)


def bytes_of_tensors(tensors: Iterable[object]) -> int:
    """Bytes of the tensors' memory; shared memory counts once, other objects do not count."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())


def _storages(values: object) -> list[torch.UntypedStorage]:
    """The storages of all tensors that have one; sparse ones have not."""
    return [tensor.untyped_storage() for tensor in tensors_in(values) if has_storage(tensor)]
