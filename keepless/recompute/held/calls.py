"""The running call: what autograd saves in it, and what it writes over."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from ...inputs import tensors_in
from ...saved import ByStorage, Kept, is_ordinary
from ...torch_internals import Hooks, address, next_node_number, node_number
from .values import Again, Memory, Recipe, Saved, Value


class Inside(NamedTuple):
    """A tensor that the running call has made itself, and saves."""

    value: Value
    number: int  # among the tensors that the call saves
    is_base: bool  # the saved tensor is a view of it


class Call:
    """The running call of a function, and what autograd has saved in it. It holds tensors only while the call runs."""

    def __init__(self, function: Callable[..., Any], row: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.row = row  # of the table of functions
        self.arguments = (*args, *kwargs.values()) if kwargs else args
        self.first_node_number = next_node_number()
        self.overwrites = False  # it overwrites an argument
        self.version: int | None = None  # of the first argument before the call, if the call overwrites it
        self.before: Value | None = None  # value of that argument then
        self.why = ""  # why the result is kept
        self.random: Any = None  # the state of the generator before the call, if it may be needed
        self.save_count = 0  # of tensors saved so far
        # Tensors that autograd saves, what it holds instead, and whether the tensor had a value already.
        self.packed: list[tuple[Tensor, Any, bool]] = []
        self.copied: dict[int, Tensor] = {}  # arguments, by the ids of copies that the call saves
        self.inside: list[Inside] = []  # tensors saved inside the call, which it may have made itself
        self.replaceable: list[Saved] = []  # saved arguments that the result can replace
        self.unsettled: list[tuple[Value, Tensor]] = []  # kept, but not yet given to the outer hooks (rule 10)
        self.recipes: list[tuple[Recipe, Again]] = []
        self.planned: int | None = None  # what a plan has decided, if it has
        self.site: Any = None  # what earlier passes have taught about it
        self.is_advised = False  # they have dropped something, so the rules do not ask again what it costs
        self.began = (0, 0)  # in a counted step: the numbers of its first event and operator

    def has_made(self, base: Tensor) -> bool:
        """Whether a result that is a view of `base` has new memory. Always False for calls that overwrite."""
        node = base.grad_fn
        if self.overwrites or node is None or node_number(node) < self.first_node_number:
            return False
        memory = address(base.untyped_storage())  # compared too: another thread's tensor may have a later node
        inputs = filter(is_ordinary, tensors_in(self.arguments))
        return memory not in [address(tensor.untyped_storage()) for tensor in inputs]

    def freeable_bytes(self, result: Tensor) -> int:
        """Bytes that can be freed if the call is repeated in the backward pass."""
        return result.nbytes + sum([part.value.bytes for part in self.inside])


class Overwriting(NamedTuple):
    """A call that may write over a tensor."""

    tensor: Tensor
    storage: UntypedStorage
    version: int  # before the call
    memory: Memory
    originals: dict[Value, Kept]  # of what was copied


def begin_overwriting(tensor: Tensor, memories: ByStorage[Memory], outer: Hooks | None) -> Overwriting | None:
    """Copy what recipes read from a tensor's memory. None if nothing is saved or read from it.

    `memories`: of kept values. `outer`: hooks that get the copies.
    """
    storage = tensor.untyped_storage()
    memory = memories.get(storage)
    if memory is None:
        return None
    values = filter(None, [reference() for reference in memory.values])
    read: list[Any] = [value for value in values if _is_read_from(value, address(storage))]
    if not (memory.saves or read):
        return None
    memories.pop(storage)
    write = Overwriting(tensor, storage, tensor._version, memory, {})
    for value in read:
        kept = value.source if isinstance(value, Value) else value
        if not isinstance(kept, Kept) or kept.is_modified():
            continue
        copy = _copy_of(kept, tensor)
        if isinstance(value, Value):
            write.originals[value] = kept
            value.source = Kept(copy, outer)
            value.storage = 0
        else:
            kept.packed = copy
            kept.version = copy._version
    return write


def _copy_of(kept: Kept, sharing: Tensor) -> Tensor:
    """A copy of a kept tensor, also in its need of a gradient. `sharing`: another tensor in its memory."""
    with torch.inference_mode(False), torch.no_grad():
        original = kept.original(sharing)
        return original.clone().requires_grad_(original.requires_grad and original.is_leaf)


def _is_read_from(value: Value | Kept, storage_address: int) -> bool:
    """Whether recipes may read a value or parameter from the storage with this address, and not from a copy."""
    if isinstance(value, Value):
        return value.storage == storage_address and value.may_be_read()
    return address(value.packed.untyped_storage()) == storage_address


def end_overwriting(write: Overwriting, memories: ByStorage[Memory]) -> bool:
    """Refuse what autograd has saved of the memory, if the call has written there.

    A tensor that `.data` has returned has a version of its own. If the call has written to such a tensor, autograd
    reads the memory, as PyTorch alone does, and the result is True. Otherwise it is False.
    """
    if write.tensor._version == write.version:
        _note_again(write, memories)
        return False
    memory = write.memory
    originals = write.originals
    values = [value for value in [reference() for reference in memory.values] if isinstance(value, Value)]
    sources: list[Any] = [value.source for value in values if value.storage and type(value.source) is Kept]
    # The write has not changed the version of what is kept: it went to a tensor that `.data` has returned.
    is_unseen = any([not kept.is_modified() for kept in (*sources, *originals.values())])
    for saved, tensor in memory.take_saves():
        if not is_unseen:
            saved.is_overwritten = True
        elif saved.value in originals:
            saved.read_instead(Value(originals[saved.value]))
        else:
            saved.read_memory(tensor, write.tensor, None)
    if is_unseen:
        _note_again(write, memories)
    return is_unseen


def _note_again(write: Overwriting, memories: ByStorage[Memory]) -> None:
    """Note what was kept in a memory, and saved of it, before the call: it still is."""
    memory = memories.get(write.storage) or memories.put(write.storage, write.memory)
    if memory is not write.memory:
        memory.values += write.memory.values
        memory.saves += write.memory.saves
