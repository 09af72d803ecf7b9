"""Count the memory of tensors, real or fake, while they exist."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self.references:
                self._add(storage)
        return result

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, if it was made in this context and still exists."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size, number = storage._cdata, storage.nbytes(), len(self.changes)

        def freed(_: object) -> None:
            del self.references[address], self.numbers[address]
            self.bytes -= size
            self.changes.append(Change(number, -size, self.place()))

        self.references[address] = weakref.ref(storage, freed)
        self.numbers[address] = number
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.changes.append(Change(number, size, self.place()))


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if torch.is_tensor(value)]
