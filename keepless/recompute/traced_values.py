"""The values of a traced forward pass: which tensor has which value, and who reads it."""

import weakref
from collections.abc import Callable

from torch import Tensor, UntypedStorage

from ..torch_internals import address
from .step import Kind, StepValue
from .values import Again


class _Known(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("storage", "value", "version")

    storage: int  # address; assigning to `data` changes it, but not the version
    value: int
    version: int


class TracedValues:
    """Registry of the values of a forward pass.

    Args:
        memory: the number of a tensor's memory.
        memories: bytes of each memory.
    """

    def __init__(self, memory: Callable[[Tensor], int], memories: list[int]) -> None:
        self.memory, self.memories = memory, memories
        self.values: list[StepValue] = []
        self.readers: list[int] = []  # of each value: saves and recipes of other values
        self.sign_readers: list[int] = []
        self.made: dict[int, weakref.ref[UntypedStorage]] = {}  # by address: made without gradient by calls
        self._known: dict[int, _Known] = {}  # by id of the tensor

    def clear(self) -> None:
        """Forget which tensors have values."""
        self._known.clear()
        self.made.clear()

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> int:
        """The value of a tensor now, or `overwrites` versions ago; -1 if it is not known."""
        known = self._known.get(id(tensor))
        if known is None or known.version != tensor._version - overwrites or known() is not tensor:
            return -1
        return known.value if known.storage == address(tensor.untyped_storage()) else -1

    def remember(self, tensor: Tensor, value: int) -> int:
        """Note the value of a tensor in its current version."""
        known = self._known[id(tensor)] = _Known(tensor)
        known.value, known.version, known.storage = value, tensor._version, address(tensor.untyped_storage())
        return value

    def keep(self, tensor: Tensor) -> int:
        """Note that a tensor is kept."""
        return self.remember(tensor, self.add(Kind.KEPT, tensor))

    def overwrite(self, value: int, tensor: Tensor) -> bool:
        """A call has overwritten a tensor of this value. Returns whether the value can still be recomputed."""
        memory, pending, overwritten = self.memory(tensor), [value], []
        while pending:
            number = pending.pop()
            one = self.values[number]
            if one.kind == Kind.KEPT and one.memory == memory:
                return False
            if one.memory == memory or one.kind == Kind.FOLLOWS:
                pending += one.inputs
            if one.memory == memory and one.kind == Kind.FREE:
                overwritten.append(number)
        for number in overwritten:
            self.values[number] = self.values[number]._replace(kind=Kind.OVERWRITTEN)
        return True

    def unread_bytes(self, value: int) -> int:
        """Bytes of kept memory that a value needs, and that operations do not read or only for signs."""
        pending, seen, total = [value], set(), 0
        while pending:
            number = pending.pop()
            if number in seen or self.readers[number] != self.sign_readers[number]:
                continue
            seen.add(number)
            one = self.values[number]
            if one.kind == Kind.FOLLOWS:
                pending += one.inputs
            else:
                total += self.memories[one.memory]
        return total

    def reads_memory(self, value: int, memory: int) -> bool:
        pending = [value]
        while pending:
            one = self.values[pending.pop()]
            if one.kind == Kind.FOLLOWS:
                pending += one.inputs
            elif one.memory == memory:
                return True
        return False

    def narrowed(self, indices: Tensor, size: int) -> int:
        """Indices are kept in a type of `size` bytes."""
        return self.remember(indices, self.add(Kind.FOLLOWS, indices, (self._own(size * indices.numel()),)))

    def own_copy(self, tensor: Tensor) -> int:
        """A recipe keeps a copy of a small tensor, which may change."""
        return self._own(min(tensor.untyped_storage().nbytes(), tensor.nbytes))

    def _own(self, size: int) -> int:
        """A value that is kept in memory of its own."""
        self.memories.append(size)
        self.values.append(StepValue(Kind.KEPT, len(self.memories) - 1, size, (), -1, -1))
        self.readers.append(0)
        self.sign_readers.append(0)
        return len(self.values) - 1

    def add(self, kind: Kind, tensor: Tensor, inputs: tuple[int, ...] = ()) -> int:
        self.values.append(self.value(kind, tensor, inputs))
        self.readers.append(0)
        self.sign_readers.append(0)
        return len(self.values) - 1

    def value(
        self,
        kind: Kind,
        tensor: Tensor,
        inputs: tuple[int, ...],
        call: int = -1,
        again: Again | None = None,
        leader: int = -1,
    ) -> StepValue:
        """A value. `inputs`: what its recipe reads. `again`: how to repeat its call."""
        memory = self.memory(tensor)
        sharing = (i for i in inputs if self.values[i].memory == memory and self.values[i].kind != Kind.OVERWRITTEN)
        alias = next(sharing, -1)
        flags = (False, False) if again is None else (again.fresh, again.can_overwrite and bool(inputs))
        size = 0 if alias >= 0 else tensor.numel() * tensor.itemsize
        return StepValue(kind, memory, size, inputs, alias, call, is_fresh=flags[0], overwrites=flags[1], leader=leader)

    def count_reader(self, value: int, change: int) -> None:
        pending = [value]
        while pending:
            number = pending.pop()
            self.readers[number] += change
            if self.readers[number] == max(change, 0) and self.values[number].kind == Kind.FOLLOWS:
                pending += self.values[number].inputs

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory made without gradient by a call, and not shared with NumPy or the like."""
        storage = tensor.untyped_storage()
        found = self.made.get(address(storage))
        return found is not None and found() is storage and storage.resizable()
