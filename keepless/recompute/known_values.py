"""Which values the tensors of a forward pass have, and what must happen before one is written over."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import tensors_in
from ..saved import Kept, is_ordinary
from ..torch_internals import Hooks, StorageWeakRef, address
from .values import Saved, Value


class _Entry(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("key", "storage", "value", "version")

    key: int
    storage: int  # address; assigning to `data` changes it, but not the version
    value: Value
    version: int


class _Dependents(NamedTuple):
    """What is copied or marked before a storage is overwritten."""

    storage: StorageWeakRef  # while it exists, no other storage gets the same address
    things: list[weakref.ref[Any]]  # `Value`s and `Saved`s


class _Overwriting(NamedTuple):
    """A call that may write over a tensor."""

    tensor: Tensor
    version: int  # before
    dependents: _Dependents | None  # of its memory
    copied: list[tuple[Value, Kept, int]]  # values that have copies meanwhile, with their sources and storages

    def things(self) -> Iterator[Value | Saved]:
        if self.dependents is not None:
            yield from filter(None, (reference() for reference in self.dependents.things))


class KnownValues:
    """Registry of one forward pass: each living tensor's value, and what depends on its storage."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by id of the tensor
        self.dependents: dict[int, _Dependents] = {}  # by address of the storage
        self.signs: list[weakref.ref[Value]] = []  # values that are read for their signs
        self.gone: list[Value] = []  # values in `signs` whose tensors have been freed

    def clear(self) -> None:
        """The forward pass has ended. What was modified in it unseen, e.g. by another thread, is refused later.

        Hooks around the recording, such as a checkpoint's, might give it back without a difference in versions.
        """
        for thing in (reference() for dependents in self.dependents.values() for reference in dependents.things):
            if isinstance(thing, Value) and isinstance(thing.source, Kept) and thing.source.is_modified():
                thing.source.spoil()
        self.entries.clear()
        self.dependents.clear()
        self.signs.clear()
        self.gone.clear()

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its present version."""
        entry = _Entry(tensor, self._forget)
        entry.key, entry.value, entry.version = id(tensor), value, tensor._version
        entry.storage = address(tensor.untyped_storage())
        self.entries[entry.key] = entry
        return value

    def _forget(self, entry: _Entry) -> None:
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
            if entry.value.sign_readers:
                self.gone.append(entry.value)

    def settle(self, outer: Hooks | None) -> None:
        """Settle values that are read for their signs, and whose tensors have been freed: see `Value.settle`."""
        if self.gone:
            self.gone = [value for value in self.gone if not value.settle(outer)]

    def settle_all(self, outer: Hooks | None) -> None:
        """Settle all values that are read for their signs, at the end of the forward pass."""
        for value in filter(None, (reference() for reference in self.signs)):
            value.settle(outer, at_end=True)

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value of a tensor now, or `overwrites` versions ago; None if it is not known."""
        entry = self.entries.get(id(tensor))
        if entry is None or entry.version != tensor._version - overwrites or entry() is not tensor:
            return None
        return entry.value if entry.storage == address(tensor.untyped_storage()) else None

    def depends_on_memory(self, thing: Value | Saved, tensor: Tensor) -> None:
        """Note that a kept value, or a `Saved`, depends on a tensor's memory."""
        storage = tensor.untyped_storage()
        dependents = self.dependents.get(address(storage))
        if dependents is None:
            dependents = self.dependents[address(storage)] = _Dependents(StorageWeakRef(storage), [])
        dependents.things.append(weakref.ref(thing))

    def before_overwriting(self, tensor: Tensor, outer: Hooks | None) -> _Overwriting:
        """Copy the values in a tensor's memory that recipes read."""
        dependents = self.dependents.pop(address(tensor.untyped_storage()), None)
        write = _Overwriting(tensor, tensor._version, dependents, [])
        for thing in write.things():
            if isinstance(thing, Saved) or not thing.recipes:
                continue
            if isinstance(kept := thing.source, Kept) and not kept.is_modified():
                write.copied.append((thing, kept, thing.storage))
                thing.source, thing.storage = Kept(kept.get().clone(), outer), 0
        return write

    def after_overwriting(self, write: _Overwriting) -> None:
        """Mark what operations saved as overwritten; or undo what was done, if nothing was written."""
        if write.tensor._version != write.version:
            for thing in write.things():
                if isinstance(thing, Saved):
                    thing.overwritten = True
        elif write.dependents is not None:
            for value, source, storage in write.copied:
                value.source, value.storage = source, storage
            now = self.dependents.setdefault(write.dependents.storage.cdata, write.dependents)
            if now is not write.dependents:
                now.things.extend(write.dependents.things)


class MadeMemory:
    """Memory that was made without gradient, e.g. of masks, by calls that a recording has seen."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}  # by address

    def note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        is_made: Callable[[Tensor], bool],
    ) -> None:
        """Note a call's results. `is_made`: whether an argument in the same memory was itself made here."""
        if getattr(function, "__name__", "") == "__get__":  # an attribute, such as `grad`
            return
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not tensor.dim() or not is_ordinary(tensor):
                continue  # single numbers, such as counts of minibatches, are copied anyway
            storage = tensor.untyped_storage()
            if address(storage) not in self.storages:
                given = filter(is_ordinary, tensors_in((args, kwargs)))
                if all(is_made(a) for a in given if address(a.untyped_storage()) == address(storage)):
                    self.storages[address(storage)] = StorageWeakRef(storage)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in such memory, so that NumPy and others do not see it."""
        storage = tensor.untyped_storage()
        return address(storage) in self.storages and storage.resizable()

    def clear(self) -> None:
        self.storages.clear()
