"""What is known of the tensors of a forward pass while it runs."""

import weakref
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .saved import Hooks, Kept
from .values import Recipe, Value


class _Entry(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("key", "value", "version")

    key: int
    value: Value
    version: int


class _Dependents(NamedTuple):
    """Values that depend on the contents of some memory."""

    storage: StorageWeakRef  # while it exists, no other storage gets the same address
    values: list[weakref.ref[Value]]


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

    def depends_on_memory(self, value: Value, tensor: Tensor) -> None:
        """Note that a value is lost, or out of date, once a tensor is written over."""
        storage = tensor.untyped_storage()
        dependents = self.dependents.get(storage._cdata)
        if dependents is None:
            dependents = self.dependents[storage._cdata] = _Dependents(StorageWeakRef(storage), [])
        dependents.values.append(weakref.ref(value))

    def before_overwriting(self, tensor: Tensor, outer: Hooks | None) -> None:
        """Copy what only recipes need of a tensor's memory. What operations saved of it is out of date from now on."""
        dependents = self.dependents.pop(tensor.untyped_storage()._cdata, None)
        if dependents is None:
            return
        for value in filter(None, (reference() for reference in dependents.values)):
            if isinstance(value.source, Recipe):
                value.overwritten = value.saved
            elif not value.saved:
                value.source = Kept(value.source.get().clone(), outer)
