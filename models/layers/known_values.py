"""What is known of the tensors of a forward pass while it runs."""

import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .saved import Hooks, Kept
from .values import Saved, Value


class _Entry(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("key", "value", "version")

    key: int
    value: Value
    version: int


class _Dependents(NamedTuple):
    """What depends on the contents of some memory."""

    storage: StorageWeakRef  # while it exists, no other storage gets the same address
    things: list[weakref.ref[Any]]  # of values and of what operations saved


class KnownValues:
    """The values of tensors, as long as these live and are not written over."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by id of the tensor
        self.dependents: dict[int, _Dependents] = {}  # by address of the storage

    def clear(self) -> None:
        self.entries.clear()
        self.dependents.clear()

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its present version."""
        entry = _Entry(tensor, self._forget)
        entry.key, entry.value, entry.version = id(tensor), value, tensor._version
        self.entries[entry.key] = entry
        return value

    def _forget(self, entry: _Entry) -> None:
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value that a tensor has, or had so many versions ago."""
        entry = self.entries.get(id(tensor))
        if entry is None or entry.version != tensor._version - overwrites or entry() is not tensor:
            return None
        return entry.value

    def depends_on_memory(self, thing: Value | Saved, tensor: Tensor) -> None:
        """Note that a kept value, or what an operation saved, depends on a tensor's memory."""
        storage = tensor.untyped_storage()
        dependents = self.dependents.get(storage._cdata)
        if dependents is None:
            dependents = self.dependents[storage._cdata] = _Dependents(StorageWeakRef(storage), [])
        dependents.things.append(weakref.ref(thing))

    def before_overwriting(self, tensor: Tensor, outer: Hooks | None) -> None:
        """Copy what recipes need of a tensor's memory. What operations saved of it is invalid from now on."""
        dependents = self.dependents.pop(tensor.untyped_storage()._cdata, None)
        if dependents is None:
            return
        for thing in filter(None, (reference() for reference in dependents.things)):
            if isinstance(thing, Saved):
                thing.overwritten = True
            elif thing.lent and isinstance(thing.source, Kept):
                thing.source = Kept(thing.source.get().clone(), outer)
                thing.storage = 0
