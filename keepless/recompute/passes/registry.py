"""Registry of a forward pass: the values of its tensors, what it knows about their memory, and what is kept."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ...inputs import tensors_in
from ...saved import ByStorage, Gone, Kept, copied, is_ordinary
from ...torch_internals import Hooks, address, next_node_number, node_number, node_of, storage_uses
from ..held.calls import Call, begin_overwriting
from ..held.values import NO_MEMORY, Memory, Value
from .advice import MEMORY
from .report import Log

_SHORT = 2**12  # entries: with a plan, vectors from this size on get values
NOT_KNOWN: Any = (None, 0, None)  # in place of a tensor's reference, version and value


class Storages:
    """What a pass knows about memory: what it has made, what is kept there, and what may change unseen."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.first_node_number = next_node_number()
        self.input_addresses = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.memories: ByStorage[Memory] = ByStorage()
        self.unnoted: list[Value | Kept] = []  # kept by advice, or parameters of recipes, and not yet in `memories`
        self.makers: ByStorage[Any] = ByStorage()  # of memory without a gradient: sites of the calls, or True
        self.exposed: ByStorage[bool] = ByStorage()  # the set of those that the program may change unseen: all True

    def clear(self) -> None:
        self.memories.clear()
        self.unnoted = []
        self.makers.clear()
        self.exposed = ByStorage()  # recipes of norms hold the other one

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this forward pass."""
        node = node_of(tensor)
        if node is None or node_number(node) < self.first_node_number or not is_ordinary(tensor):
            return False
        return not self.input_addresses or address(tensor.untyped_storage()) not in self.input_addresses

    def note_made(self, arguments: Sequence[Any], result: object, maker: Any) -> None:
        """Note the memory of a call's results without a gradient, e.g. masks. `maker`: its site; True: it has none."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not tensor.dim() or not is_ordinary(tensor):
                continue  # single numbers, such as counts of minibatches, are copied anyway
            storage = tensor.untyped_storage()
            if not self.makers.get(storage):
                inputs = [x for x in tensors_in(arguments) if is_ordinary(x)]
                if all([self.is_made(x) for x in inputs if address(x.untyped_storage()) == address(storage)]):
                    self.makers.put(storage, maker)

    def is_made_without_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory noted by `note_made`, and not shared with NumPy or the like."""
        storage = tensor.untyped_storage()
        return self.makers.get(storage) is not None and storage.resizable()

    def teach_maker(self, tensor: Tensor) -> None:
        """Let later passes note this memory, too: its maker's site gets advice."""
        maker: Any = self.makers.get(tensor.untyped_storage())
        if maker is not True:
            maker.advice |= MEMORY

    def may_change_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor has no version, or the program may change its memory without a new one."""
        return not is_ordinary(tensor) or bool(self.exposed.by_address and self.exposed.get(tensor.untyped_storage()))

    def is_read(self, tensor: Tensor, value: Value | None) -> bool:
        """Whether something is saved or kept in the memory of a tensor. `value`: the tensor's, if it has one."""
        if value is not None and type(value.source) is Kept:
            return True
        storage = tensor.untyped_storage()  # the tensor and this object use it
        return storage_uses(address(storage)) > 2 or self.memories.get(storage) is not None

    def note_kept(self, value: Value | Kept, storage: UntypedStorage) -> None:
        """Note that a value, or a tensor that recipes read, is kept in a storage."""
        by_address = self.memories.by_address  # in place of `get` and `put`, which are calls
        place = address(storage)
        reference, memory = by_address[place] if place in by_address else NO_MEMORY
        if memory is None or reference() is not storage:
            memory = Memory()
            by_address[place] = weakref.ref(storage), memory
        memory.values += (weakref.ref(value),)

    def note_unnoted(self) -> None:
        """Note the memories of what recipes read: before a call that writes, and before rules ask what is kept."""
        while self.unnoted:
            value = self.unnoted.pop()
            kept: Any = value.source if isinstance(value, Value) else value
            try:
                storage = kept.packed.untyped_storage()
            except NotImplementedError:  # sparse
                continue
            if isinstance(value, Value):
                value.storage = address(storage)
                value.bytes = storage.nbytes()
            self.note_kept(value, storage)

    def keep_in_place(self, tensor: Tensor) -> Kept:
        """Keep a tensor that stays anyway, such as a parameter, for a recipe: copied before a call writes over it.

        What autograd holds for it is not: it raises PyTorch's error.
        """
        kept = Kept(tensor, None)
        self.unnoted.append(kept)
        return kept


class Registry:
    """Registry of one forward pass: the values of its living tensors, its storages, and what it keeps.

    Its subclass `Trace` numbers the values of a counted step, by the same rules. `outer`: the saved-tensor hooks around
    the recording. `by_plan`: a plan decides what is kept (rule 13). For other arguments see `Recording`.
    """

    kept_class: type[Kept] = Kept  # the class that holds a kept tensor

    def __init__(self, inputs: Sequence[Tensor], outer: Hooks | None, copy_parameters: bool, by_plan: bool) -> None:
        # A tensor's value, by its id, with a weak reference to the tensor and its version. The sign mask that advice
        # makes of it has the key (id, function), because other consumers need the tensor itself.
        self.by_id: dict[Any, tuple[weakref.ref[Tensor], int, Value]] = {}
        self.freed: list[Gone] = []  # those references in `by_id` whose tensors are freed
        self.storages = Storages(inputs)
        self.outer = outer
        self.copy_parameters = copy_parameters
        self.by_plan = by_plan
        # A vector without a grad_fn is saved directly, without a `Value`, if it has fewer elements.
        self.short_length = _SHORT if by_plan else sys.maxsize
        self.short_row_count = _SHORT  # so are a norm's statistics of rows
        self.log = Log()
        self.call: Call | None = None  # the running one
        self.sign_values: list[weakref.ref[Value]] = []  # values with sign consumers, in the order of these saves
        self.unsettled: list[Value] = []  # values in `sign_values` whose tensors have been freed
        self.refused_mode: type | None = None  # a mode under which a call would have got a recipe: see `changing_mode`
        self.unseen = ""  # what has hidden calls from the recording, such as a checkpoint
        self.saved_outside: list[Any] = []  # what autograd holds for tensors saved outside calls

    def clear(self, has_raised: bool) -> None:
        """The forward pass has ended; if by an error, perhaps a checkpoint's, whose hooks take no more tensors."""
        if not has_raised:
            for reference in self.sign_values:
                value = reference()
                if value is not None:
                    value.settle(self.outer, at_end=True)  # a checkpoint needs the same order each time
        self.by_id = {}
        self.freed = []
        self.sign_values = []
        self.unsettled = []
        self.storages.clear()
        self.outer = None

    def settle_freed(self) -> None:
        """Forget tensors that have been freed. If a consumer needs only their signs, `settle` their values."""
        while self.freed:
            reference = self.freed.pop()
            last_reference, _, value = self.by_id.get(reference.event, NOT_KNOWN)
            if last_reference is reference:
                del self.by_id[reference.event]
                if value.sign_consumer_count:
                    self.unsettled.append(value)
        if self.unsettled:
            self.unsettled = [value for value in self.unsettled if not value.settle(self.outer)]

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its current version, unless its values may change unseen."""
        if not (self.storages.exposed.by_address and self.storages.may_change_unseen(tensor)):
            self.by_id[id(tensor)] = Gone(tensor, self.freed, id(tensor)), tensor._version, value
        return value

    def find_value(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value of a tensor now, or `overwrites` versions ago; None if it is not known."""
        reference, version, value = self.by_id.get(id(tensor), NOT_KNOWN)
        if value is None or reference() is not tensor or version != tensor._version - overwrites:
            return None
        return value

    def keys_in(self, storage: UntypedStorage) -> list[Any]:
        """The keys in `by_id` of the tensors in a storage."""
        keys: list[Any] = []
        for key, (reference, *_) in self.by_id.items():
            tensor = reference()
            if tensor is not None and is_ordinary(tensor) and address(tensor.untyped_storage()) == address(storage):
                keys.append(key)
        return keys

    def forget_values(self, storage: UntypedStorage) -> None:
        """The tensors in a storage have other values now, though in the same version."""
        for key in self.keys_in(storage):
            del self.by_id[key]

    # What is kept

    def keep_by_advice(self, tensor: Tensor) -> Value:
        """`keep`, but the memory is noted only before a call that writes, or before rules ask."""
        value = Value(Kept(tensor, None, detaches=False))
        self.storages.unnoted.append(value)
        self.by_id[id(tensor)] = weakref.ref(tensor), tensor._version, value
        return value

    def keep(self, tensor: Tensor) -> Value:
        """Keep a tensor, and remember its value."""
        storage = tensor.untyped_storage()
        stays = is_parameter(tensor) or (tensor.is_leaf and tensor.requires_grad)
        kept_bytes = 0 if stays else storage.nbytes()
        # An alias of a tensor that the pass has made without a gradient, which would live until its end otherwise.
        is_alias = not (stays or tensor.requires_grad) and bool(self.storages.makers.get(storage))
        value = Value(self.kept_class(tensor.detach() if is_alias else tensor, None), address(storage), kept_bytes)
        value.why = self.log.why_kept(tensor)
        if self.outer is not None:
            if self.call is not None:  # the running call may still get a recipe
                self.call.unsettled.append((value, tensor))
            else:
                value.source = Kept(tensor, self.outer)
        self.storages.note_kept(value, storage)
        return self.remember(tensor, value)

    def keep_copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Value:
        """Keep a copy of a tensor, as it may change; of indices that a call saves, in a smaller dtype."""
        if dtype is None:
            copy_bytes = min(tensor.untyped_storage().nbytes(), tensor.nbytes)
            return Value(Kept(copied(tensor), self.outer), bytes=copy_bytes)
        indices = tensor.to(dtype)
        value = Value(Kept(indices, self.outer), address(indices.untyped_storage()), indices.nbytes)
        self.log.note(value, indices)
        return value

    def move_to_copy(self, value: Value, copy: Tensor) -> None:
        """Keep the value of an argument in its copy, which the call saves, if nothing else reads it."""
        if value.is_unread:
            value.source = self.kept_class(copy, None)
            value.storage = self.place(copy)
            self.storages.note_kept(value, copy.untyped_storage())

    def place(self, tensor: Tensor) -> int:
        """Identifies a tensor's memory: the address of its storage."""
        return address(tensor.untyped_storage())

    def is_fixed(self, value: Value, argument: Tensor) -> bool:
        """Whether a value can only be read from the memory of an argument, once all memories are noted."""
        return not value.is_unread and value.reads_storage(self.place(argument))

    def is_lost(self, value: Value, overwritten: Tensor) -> bool:
        """Whether a value can only be read from the memory of a tensor that a call has overwritten."""
        return value.reads_storage(self.place(overwritten))

    def note_read_when_overwritten(self, value: Value, overwritten: Tensor) -> None:
        """A recipe reads a value that a call has overwritten, and that is not lost. A counted step notes it."""

    # Memory that the program changes unseen

    def prepare_setting_data(self, tensor: Tensor, source: Tensor) -> None:
        """`tensor.data = source` will give a tensor the memory of another, but no new version."""
        self.read_as_pytorch(tensor)
        if self.storages.is_made(tensor):
            self.read_as_pytorch(source)
            self.storages.exposed.put(source.untyped_storage(), True)

    def expose(self, tensor: Tensor) -> None:
        """The program gets access to a made tensor's memory that changes no version, as `.data` and `.numpy()` do."""
        storages = self.storages
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) or storages.exposed.get(storage):
            return
        is_known = bool(self.keys_in(storage)) or storages.is_made(tensor)
        if is_known or storages.is_made_without_gradient(tensor):
            if not is_known:
                storages.teach_maker(tensor)
            storages.exposed.put(storage, True)
            self.read_as_pytorch(tensor)

    def read_as_pytorch(self, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a tensor's memory from there. Recipes get copies."""
        self.storages.note_unnoted()
        storage = tensor.untyped_storage()
        memory = self.storages.memories.get(storage)
        if memory is not None:
            self.read_memory(memory, tensor)
            begin_overwriting(tensor, self.storages.memories, self.outer)  # for the copies: no end of it is seen
        self.forget_values(storage)

    def read_memory(self, memory: Memory, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a memory from the memory itself. `tensor`: is in it."""
        for saved, saved_tensor in memory.take_saves():
            saved.read_memory(saved_tensor, tensor, self.outer)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one, as FSDP1's gathered parameters are."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
