"""Registry of the values of a forward pass: pack, find, keep and lend them, and protect them from in-place writes."""

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ..inputs import tensors_in
from ..saved import Kept, form_of, is_ordinary
from ..torch_internals import Hooks, StorageWeakRef, address, next_node_number, node_number
from .calls import Call, Inside
from .nodes import by_node, smaller_value_of
from .report import Log
from .signs import Positive
from .values import Again, Memory, Recipe, Saved, SavedView, ShapeOnly, Value

_FEW = 2**12  # entries of a tensor that a recipe may as well copy


class Trace(Protocol):
    """Sees what a recording does: see `StepTrace`, which traces a step for a budget."""

    def run(self, call: Call, is_made: Callable[[Tensor], bool]) -> Any:
        """Run a call and measure it."""

    def ended(self, result: Any) -> None:
        """A call has ended, and its result has a value."""

    def keeps(self, value: Value, tensor: Tensor) -> None: ...

    def follows(self, value: Value, tensor: Tensor) -> None:
        """A value got a recipe from autograd's node: see `by_node`."""

    def moves(self, value: Value, copy: Tensor) -> None: ...

    def overwrites(self, value: Value, tensor: Tensor) -> bool:
        """A call has overwritten a tensor of this value. Returns whether the value can still be computed again."""

    def saves(self, saved: Saved | ShapeOnly, tensor: Tensor, in_call: bool) -> None:
        """Autograd saves a tensor, in a call or by itself."""

    def forward_ends(self) -> None: ...

    def unpack(self, saved: Any) -> Tensor:
        """The unpack hook."""


class Choices(Protocol):
    """What a policy says of the tensors that a forward pass saves: see `Policy`."""

    short: int  # a vector without a grad_fn is saved directly, without a `Value`, if it has fewer elements
    copies_are_worth: int  # a copy is made again if it needs at most so many times its bytes kept for it alone

    @property
    def trace(self) -> Trace | None: ...

    @property
    def planned(self) -> Container[int]:
        """Numbers of the nodes whose results are kept, without a value until something reads them."""

    def may_read_result(self, argument: Value) -> bool:
        """Whether an operation may read its result in place of an argument that it saves."""


class _Entry(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("key", "storage", "value", "version")

    key: int
    storage: int  # address; assigning to `data` changes it, but not the version
    value: Value
    version: int


class _Overwriting(NamedTuple):
    """A call that may write over a tensor."""

    tensor: Tensor
    version: int  # before
    memory: Memory
    copied: list[tuple[Value, Kept, int]]  # values that have copies meanwhile, with their sources and storages


class KnownValues:
    """Registry of one forward pass: each living tensor's value, and what depends on its storage.

    Args:
        inputs: the network's inputs, which are not made in the forward pass.
        outer: the saved-tensor hooks around the recording.
        copy_parameters: recipes get copies of parameters, because FSDP frees the gathered ones after each use.
        choices: of the recording's policy.
    """

    def __init__(self, inputs: Sequence[Tensor], outer: Hooks | None, copy_parameters: bool, choices: Choices):
        self.start = next_node_number()
        self.outside = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.outer, self.copy_parameters, self.trace = outer, copy_parameters, choices.trace
        self.short, self.copies_are_worth = choices.short, choices.copies_are_worth
        self.may_read_result, self.late = choices.may_read_result, choices.planned
        self.log = Log()
        self.call: Call | None = None  # that is running
        self.entries: dict[int, _Entry] = {}  # by id of the tensor
        self.memories: dict[int, Memory] = {}  # by address of the storage
        self.signs: list[weakref.ref[Value]] = []  # values that are read for their signs
        self.gone: list[Value] = []  # values in `signs` whose tensors have been freed
        self.made = MadeMemory()

    def clear(self) -> None:
        """The forward pass has ended. Tensors that were modified unseen, e.g. by another thread, are refused later.

        Hooks around the recording, such as a checkpoint's, might give them back without a difference in versions.
        """
        for value in filter(None, (reference() for reference in self.signs)):
            value.settle(self.outer, at_end=True)
        if self.outer is not None:
            kept = [reference() for memory in self.memories.values() for reference in memory.values]
            for value in filter(None, kept):
                if isinstance(value.source, Kept) and value.source.is_modified():
                    value.source.spoil()
        for found in (self.entries, self.memories, self.signs, self.gone, self.made):
            found.clear()
        self.outer = self.trace = None

    def value_of(self, tensor: Tensor, call: Call | None) -> Value | None:
        """The value of a tensor, if it is kept already or can be computed from others; otherwise None."""
        if (value := self.find(tensor)) is None:
            if tensor.is_leaf:
                return None
            if self.late and self.is_late(tensor):
                return self.keep(tensor, call)
            if (found := by_node(self, tensor, call)) is None:
                return None
            value = self.remember(tensor, Value(Recipe(found, tensor)) if isinstance(found, Again) else found)
        if self.trace is not None and value.number < 0 and isinstance(value.source, Recipe):
            self.trace.follows(value, tensor)
        return value

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value of a tensor now, or `overwrites` versions ago; None if it is not known."""
        entry = self.entries.get(id(tensor))
        if entry is None or entry.version != tensor._version - overwrites or entry() is not tensor:
            return None
        return entry.value if entry.storage == address(tensor.untyped_storage()) else None

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this forward pass."""
        node = tensor.grad_fn
        if node is None or node_number(node) < self.start or not is_ordinary(tensor):
            return False
        return not self.outside or address(tensor.untyped_storage()) not in self.outside

    def is_late(self, tensor: Tensor) -> bool:
        """Whether a tensor is kept by a plan, and gets a value once something reads it."""
        return not tensor.is_leaf and node_number(tensor.grad_fn) in self.late

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its present version."""
        entry = _Entry(tensor, self._forget)
        entry.key = key = id(tensor)
        entry.value, entry.version, entry.storage = value, tensor._version, address(tensor.untyped_storage())
        self.entries[key] = entry
        return value

    def _forget(self, entry: _Entry) -> None:
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
            if entry.value.sign_readers:
                self.gone.append(entry.value)

    def keep(self, tensor: Tensor, call: Call | None) -> Value:
        """Keep a tensor, and remember its value."""
        storage = tensor.untyped_storage()
        own = 0 if tensor.is_leaf and tensor.requires_grad else storage.nbytes()
        value = Value(Kept(tensor, None), address(storage), own)
        if self.outer is not None:
            if call is not None:  # the running call may yet get a recipe
                call.unsettled += ((value, tensor),)
            else:
                value.source = Kept(tensor, self.outer)
        self.memory_of(tensor).values.append(weakref.ref(value))
        if self.trace is not None:
            self.trace.keeps(value, tensor)
        return self.remember(tensor, value)

    def lend(self, tensor: Tensor, call: Call | None) -> Value | Kept:
        """Keep a tensor for a recipe, if it has no value yet."""
        if self.copy_parameters and isinstance(tensor, nn.Parameter):
            return Kept(tensor.detach().clone(), None)
        value = self.value_of(tensor, call)
        if value is None and isinstance(tensor, nn.Parameter):  # it stays where it is
            return Kept(tensor, None)
        return value or self.keep(tensor, call)

    def copied(self, argument: Tensor, copy: Tensor, call: Call) -> Value:
        """A call has copied an argument, because it is going to overwrite it. Returns their value."""
        value = smaller_value_of(self, argument, copy, call)
        if value is None or not (value.unread or not value.reads_storage(address(argument.untyped_storage()))):
            return self.remember(argument, self.keep(copy, call))
        if value.unread:  # keep the copy instead
            value.source, value.storage = Kept(copy, None), address(copy.untyped_storage())
            self.memory_of(copy).values.append(weakref.ref(value))
        if self.trace is not None:
            self.trace.moves(value, copy)
        return value

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = address(storage)
        memory = self.memories.get(key)
        if memory is None:
            memory = self.memories[key] = Memory(StorageWeakRef(storage))
        return memory

    def pack(self, tensor: Tensor) -> Saved | Kept | ShapeOnly:
        """Return the object that autograd saves in place of a tensor."""
        call = self.call
        if call is not None:
            call.saves += 1
        if self.outer is None:  # the quick way, for the many vectors, parameters, and views of these
            if not tensor.is_leaf:
                is_simple = isinstance(tensor._base, nn.Parameter)
            elif tensor.dim() < 2 and tensor.numel() < self.short:
                is_simple = True
            else:
                is_simple = isinstance(tensor, nn.Parameter) or (self.trace is None and _are_of_rows(tensor))
            if is_simple:
                kept = Kept(tensor, None)
                if call is not None and tensor.requires_grad:
                    call.parameters += ((tensor, kept),)
                return kept
        if not is_ordinary(tensor):
            kept = Kept(tensor, self.outer)
            self.log.keep_other(kept, tensor, None if call is None else call.function)
            return kept
        value = self.find(tensor)
        if call is not None and (packed := self._without_value(tensor, value, call)) is not None:
            return packed
        if value is None:
            value = self.value_of(tensor, call) or self._keep_with_base(tensor, call)
        if not value.readers and value.unread:
            self.note_need(value, tensor)
        saved = Saved(value, self.memory_of(tensor))
        if call is not None:
            positive, result_serves = call.traits.positive, call.traits.result_serves
            if result_serves is not None and call.answers(result_serves) and self.may_read_result(value):
                call.replaceable += (saved,)
            elif positive is not None and value.positive in (None, positive):
                self.reads_signs(saved, positive)
        if self.trace is not None:
            self.trace.saves(saved, tensor, call is not None)
        return saved

    def _without_value(self, tensor: Tensor, value: Value | None, call: Call) -> ShapeOnly | Kept | SavedView | None:
        """The object for a tensor of which the call needs the shape alone, or that needs no value of its own."""
        traits = call.traits
        if (asks := traits.reads_shape_only) is not None and tensor.requires_grad and call.answers(asks):
            shape = ShapeOnly(tensor)
            if self.trace is not None:
                self.trace.saves(shape, tensor, True)
            return shape
        may_do_with_less = traits.positive is not None or traits.result_serves is not None
        if value is not None or may_do_with_less or self.outer is not None or self.trace is not None:
            return None
        if self.late and self.is_late(tensor):
            kept = Kept(tensor, None)
            self.log.keep(kept, tensor, call.function)
            return kept
        base = tensor._base  # of a view that the call itself has made, say, so that no recipe reads it
        if base is None or (form := form_of(tensor, base)) is None or (of_base := self.value_of(base, call)) is None:
            return None
        if not of_base.readers and of_base.unread:
            self.note_need(of_base, base)
        return SavedView(of_base, self.memory_of(tensor), form)

    def _keep_with_base(self, tensor: Tensor, call: Call | None) -> Value:
        """Keep a tensor; if it is a view of all of its base, keep the base, so that its other views follow too."""
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and self.is_made(base):
            self._keep_itself(base, call, True)
            if (value := self.value_of(tensor, call)) is not None:
                return value
        return self._keep_itself(tensor, call, False)

    def _keep_itself(self, tensor: Tensor, call: Call | None, is_base: bool) -> Value:
        value = self.keep(tensor, call)
        if is_base:
            self.note_need(value, tensor)
        if call is not None and call.traits.inside is not None:
            call.inside += (Inside(value, call.saves - 1, is_base),)
        return value

    def note_need(self, value: Value, tensor: Tensor) -> None:
        """Log a kept value when it gets its first reader."""
        self.log.keep(value, tensor, None if self.call is None else self.call.function)

    def reads_signs(self, saved: Saved, positive: Positive) -> None:
        """Note that an operation only asks which entries of a saved tensor are positive."""
        saved.reads_signs, saved.value.positive = True, positive
        saved.value.sign_readers += 1
        self.signs.append(weakref.ref(saved.value))

    def settle_gone(self) -> None:
        """Settle values that are read for their signs, and whose tensors have been freed: see `Value.settle`."""
        if self.gone:
            self.gone = [value for value in self.gone if not value.settle(self.outer)]

    def before_overwriting(self, tensor: Tensor) -> _Overwriting | None:
        """Copy the values in a tensor's memory that recipes read. None if nothing depends on it."""
        memory = self.memories.pop(address(tensor.untyped_storage()), None)
        if memory is None:
            return None
        write = _Overwriting(tensor, tensor._version, memory, [])
        for value in filter(None, (reference() for reference in memory.values)):
            if value.recipes and isinstance(kept := value.source, Kept) and not kept.is_modified():
                write.copied.append((value, kept, value.storage))
                value.source, value.storage = Kept(kept.get().clone(), self.outer), 0
        return write

    def after_overwriting(self, write: _Overwriting) -> None:
        """Mark the tensors that operations saved as overwritten; or undo the copies, if nothing was written."""
        memory: Memory | None = write.memory
        if write.tensor._version != write.version:
            while memory is not None:
                memory.overwritten, memory = True, memory.earlier
            return
        for value, source, storage in write.copied:
            value.source, value.storage = source, storage
        now = self.memories.setdefault(write.memory.storage.cdata, write.memory)
        if now is not write.memory:
            now.values += write.memory.values
            now.earlier = write.memory


def _are_of_rows(tensor: Tensor) -> bool:
    """Whether a tensor looks like the few statistics of a layer norm's rows."""
    return tensor.dim() > 1 and tensor.size(-1) == 1 and tensor.numel() < _FEW


class MadeMemory:
    """Memory that was made without gradient, e.g. of masks, by calls that a recording has seen."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}  # by address

    def note(self, arguments: Any, result: object, is_made: Callable[[Tensor], bool]) -> None:
        """Note a call's results. `is_made`: whether an argument in the same memory was itself made here."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not tensor.dim() or not is_ordinary(tensor):
                continue  # single numbers, such as counts of minibatches, are copied anyway
            storage = tensor.untyped_storage()
            if address(storage) not in self.storages:
                given = filter(is_ordinary, tensors_in(arguments))
                if all(is_made(a) for a in given if address(a.untyped_storage()) == address(storage)):
                    self.storages[address(storage)] = StorageWeakRef(storage)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in such memory, so that NumPy and others do not see it."""
        storage = tensor.untyped_storage()
        return address(storage) in self.storages and storage.resizable()

    def clear(self) -> None:
        self.storages.clear()
