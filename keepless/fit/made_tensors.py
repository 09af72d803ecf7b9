"""Count the memory of tensors, real or fake, while they exist."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_internals import OpOverload, TorchDispatchMode, address, tree_leaves


class Change(NamedTuple):
    """Memory of a tensor, allocated or freed."""

    number: int  # counts the allocations
    bytes: int  # negative: freed
    place: str  # where in the program


class MadeTensors(TorchDispatchMode):
    """Context that counts the bytes of the tensors made in it, real or fake, for as long as they exist.

    Tensors that autograd and checkpointing keep for the backward pass count too.
    """

    def __init__(self, place: Callable[[], str] = str):
        """`place` tells where the program is, e.g. the running module."""
        super().__init__()
        self.bytes = self.peak = 0  # bytes that exist now, and the most so far
        self.changes: list[Change] = []  # every allocation and release, in order
        self.place = place
        self.numbers: dict[int, int] = {}  # of allocations, by address
        self.references: dict[int, weakref.ref] = {}  # by address

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        given = set(map(address, _storages((args, kwargs))))
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if address(storage) not in given and address(storage) not in self.references:
                self._add(storage)
        return result

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, if it was made in this context and still exists."""
        return self.numbers.get(address(tensor.untyped_storage()))

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size, number = address(storage), storage.nbytes(), len(self.changes)

        def freed(_: object) -> None:
            del self.references[place], self.numbers[place]
            self.bytes -= size
            self.changes.append(Change(number, -size, self.place()))

        self.references[place] = weakref.ref(storage, freed)
        self.numbers[place] = number
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.changes.append(Change(number, size, self.place()))


def bytes_of_tensors(tensors: Iterable[object]) -> int:
    """Bytes of the memory of tensors; memory that they share counts once. Other objects have none."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if torch.is_tensor(value)]
