"""What a backward pass reads: values that are kept, recomputed, or refused as overwritten."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...saved import (
    ByStorage,
    Kept,
    autocast_as,
    autocast_of,
    check_version,
    current_stream,
    has_autocast,
    laid_out,
    view,
    wait_for,
)
from ...torch_internals import (
    Hooks,
    address,
    all_packed_by,
    at_end_of_backward,
    backward_number,
    function_modes_on,
    is_any_autocast_enabled,
    without_function_modes,
)
from .elsewhere import is_elsewhere
from .signs import Positive, Signs


class Again(NamedTuple):
    """A call that computes the same result again.

    `fresh`: its result shares no memory with anything else. `can_overwrite`: the function is elementwise and takes
    `inplace=True`, which is used where its first argument has no other consumer. `draws`: it draws random numbers.
    """

    function: Callable[..., Tensor]
    arguments: Sequence[Any]  # `Value`s, `Kept`, tensors that the recipe holds itself, and constants
    fresh: bool = False
    can_overwrite: bool = False
    draws: bool = False


class _BackwardPass(threading.local):
    """The backward pass that this thread runs, and the values that hold tensors during it."""

    number = -1
    holders: list[weakref.ref["Value"]] = []  # noqa: RUF012  # replaced before it is changed


_pass = _BackwardPass()
_is_grad_enabled = torch.is_grad_enabled


class Value:
    """A tensor of the forward pass, for the operations and recipes that read it in a backward pass.

    It is recomputed (or unpacked) once per backward pass, for its first consumer, and held until the last has read it.
    """

    tensor: Tensor | None = None  # while it is held in a backward pass: with its version, and the consumers left
    version: int
    consumers_left: int
    readers: tuple[weakref.ref[Any], ...] = ()  # recipes (and saves) that may still read it
    number = -1  # its call's in a plan; its own in a counted step
    why = ""  # why it is kept
    consumer_count = 0  # operations that have saved it, and recipes with consumers of their own
    sign_consumer_count = 0  # those that need only its sign mask
    positive: Positive | None = None  # the function that gives them this mask
    stream: torch.cuda.Stream | None = None  # that computes it, or made the tensor whose signs are read
    storage = 0  # address, if the tensor is kept; in a counted step the number of its memory
    bytes = 0  # of that storage; 0 for leaves with a gradient, which stay anyway

    def __init__(self, source: "Kept | Recipe | Signs | None", storage: int = 0, bytes: int = 0):
        self.source = source  # None: the call that makes it, by advice, is still running
        if storage or bytes:
            self.storage = storage
            self.bytes = bytes

    @property
    def is_unread(self) -> bool:
        """Whether it is kept and nothing reads it: its memory is freed with the tensor."""
        return not (self.consumer_count or isinstance(self.source, Recipe) or self.may_be_read())

    @property
    def is_spare(self) -> bool:
        """Whether a recipe computes it for a single consumer, which may overwrite it."""
        return self.consumer_count == 1 and type(self.source) is Recipe and self.source.fresh

    def may_be_read(self) -> bool:
        """Whether a recipe may still read it."""
        while self.readers and self.readers[-1]() is None:
            self.readers = self.readers[:-1]
        return bool(self.readers)

    def count_consumer(self, change: int) -> None:
        """Count a consumer that has come (1) or gone (-1)."""
        self.consumer_count += change
        if type(self.source) is Recipe and self.consumer_count == (change > 0):
            self.source.count_wanted(change)

    def become(self, recipe: "Recipe") -> None:
        """From now on this recipe computes it: drop the tensor, or the recipe before."""
        previous_source = self.source
        self.source = recipe
        if self.consumer_count:
            recipe.count_wanted(1)
            if isinstance(previous_source, Recipe):
                previous_source.count_wanted(-1)

    def settle(self, hooks: Hooks | None, at_end: bool = False) -> bool:
        """Keep only a sign mask if no consumer needs more; otherwise give the tensor to the outer hooks.

        False while a recipe may still read it, at most until the forward pass ends.
        """
        kept = self.source
        if not isinstance(kept, Kept) or kept.hooks is not None or kept.is_modified():
            return True
        if self.sign_consumer_count == self.consumer_count:
            if not at_end and self.may_be_read():
                return False
            assert self.positive is not None
            tensor = kept.get()
            wait_for(self.stream, tensor)  # it is packed during a later call, perhaps on another stream
            self.source = Signs(tensor, self.positive, hooks)
            self.storage = 0
        elif hooks is not None:
            self.source = Kept(kept.get(), hooks)
        return True

    def reads_storage(self, storage: int) -> bool:
        """Whether it is kept in the storage with this address, or computed from a value that is."""
        seen: set[Value] = set()
        values = [self]
        while values:
            value = values.pop()
            if isinstance(value.source, Recipe):
                values += [read for read in value.source.inputs if read not in seen]
                seen.update(value.source.inputs)
            elif value.storage == storage and not (isinstance(value.source, Kept) and value.source.is_freed()):
                return True  # otherwise another tensor has got its address
        return False

    def get(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if a tensor that it needs was modified in place."""
        if self.tensor is not None:
            tensor = self.tensor
            if self.stream is not None:
                wait_for(self.stream, tensor)
            check_version(tensor, self.version)  # a backward function may have overwritten its input
            self.consumers_left -= 1
            if self.consumers_left == 0:
                self.tensor = None
            return tensor
        source = self.source
        if type(source) is Recipe:
            arguments = [*source.arguments]
            is_over = source.can_overwrite and type(arguments[0]) is Value and arguments[0].is_spare
            for position, argument in enumerate(arguments):  # one frame of Python for each recipe of a long chain
                if type(argument) is Value:
                    kept = argument.source
                    arguments[position] = kept.get() if type(kept) is Kept and kept.hooks is None else argument.get()
                elif type(argument) is Kept:
                    arguments[position] = argument.get()
            tensor = source.compute(self, arguments, is_over)
        else:
            assert isinstance(source, (Kept, Signs))
            tensor = source.get()
            if type(source) is Kept and source.hooks is None:
                return tensor
        if self.consumer_count > 1:
            self.hold(tensor, self.consumer_count - 1)
        return tensor

    def hold(self, tensor: Tensor, consumer_count: int) -> None:
        """Hold a tensor until so many consumers have read it, or the backward pass ends."""
        number = -1 if consumer_count < 1 else backward_number()
        if number == -1:
            return
        if number != _pass.number:
            _pass.number = number
            _pass.holders = []
            at_end_of_backward(partial(_release, _pass.holders))
        self.tensor = tensor
        self.version = tensor._version
        self.consumers_left = consumer_count
        self.stream = current_stream(tensor) if tensor.is_cuda else None
        _pass.holders.append(weakref.ref(self))  # weak, because values hold what they are computed from


def _release(holders: list[weakref.ref[Value]]) -> None:
    for holder in filter(None, (reference() for reference in holders)):
        holder.tensor = None
    holders.clear()


def kept_bytes_below(values: Iterable[Value], only_unread: bool = False) -> int:
    """Bytes of the kept memory in which these values are, or from which they are computed.

    `only_unread`: without values that stay anyway, as a consumer needs more than the sign mask.
    """
    seen: set[Value] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value not in seen and not (only_unread and value.consumer_count > value.sign_consumer_count):
            seen.add(value)
            waiting += value.source.inputs if isinstance(value.source, Recipe) else ()
    return sum([value.bytes for value in seen if isinstance(value.source, Kept)])


class Memory:
    """A storage of the forward pass, until it is overwritten: what is kept in it, and what autograd has saved of it."""

    values: tuple[weakref.ref[Any], ...] = ()  # kept values, and parameters that recipes read
    saves: tuple[tuple[weakref.ref["Saved"], weakref.ref[Tensor]], ...] = ()

    def take_saves(self) -> list[tuple["Saved", Tensor | None]]:
        """Each saved object of this memory, once, with its tensor, which is None if it was freed."""
        saves = [(saved_reference(), tensor_reference()) for saved_reference, tensor_reference in self.saves]
        self.saves = ()
        return [(saved, tensor) for saved, tensor in saves if saved is not None]


NO_MEMORY: Any = (None, None)  # in place of a storage's reference and memory


class Saved:
    """What autograd saves in place of a tensor: its value. `get` fails if the tensor's memory was overwritten."""

    is_overwritten = False
    number = -1  # in a counted step
    reads_signs = False  # the operation only needs the sign mask

    def __init__(self, value: Value, memories: ByStorage[Memory], tensor: Tensor):
        """`memories`: all of the pass; the tensor's is added if it is new."""
        storage = tensor.untyped_storage()
        by_address = memories.by_address  # in place of `get` and `put`, which are calls
        place = address(storage)
        reference, memory = by_address[place] if place in by_address else NO_MEMORY
        if memory is None or reference() is not storage:
            memory = Memory()
            by_address[place] = weakref.ref(storage), memory
        memory.saves += ((weakref.ref(self), weakref.ref(tensor)),)
        self.value = value
        is_first = not value.consumer_count
        value.consumer_count += 1
        if is_first and type(value.source) is Recipe:
            value.source.count_wanted(1)

    def read_instead(self, value: Value) -> None:
        """Read another value in its place."""
        self.value.sign_consumer_count -= self.reads_signs
        self.reads_signs = False
        self.value.count_consumer(-1)
        self.value = value
        value.count_consumer(1)

    def read_memory(self, tensor: Tensor | None, sharing: Tensor, hooks: Hooks | None) -> None:
        """Read the saved tensor itself from now on, as PyTorch alone does. `sharing`: another one in its memory."""
        source = self.value.source
        if type(source) is Kept:
            has_program_hooks = source.hooks is not None and not is_elsewhere(source.hooks)
            if source.is_modified() or has_program_hooks:
                return  # it is refused, or the hooks have got it
        program_hooks = None if is_elsewhere(hooks) else hooks
        if tensor is not None:  # the result of the operation itself is detached, as it would keep itself alive
            is_result = any([pack is self for pack in all_packed_by(tensor.grad_fn)])
            kept = Kept(tensor, program_hooks, detaches=is_result)
        elif type(source) is not Kept:
            kept = Kept(self._made_from(sharing), program_hooks)
        else:
            kept = source if source.hooks is None else Kept(source.original(sharing), program_hooks)
        self.read_instead(Value(kept))

    def _made_from(self, sharing: Tensor) -> Tensor:
        """The saved tensor, which is freed, made from another one in its memory."""
        source = self.value.source
        if type(source) is Recipe and source.function is view:
            *_, shape, stride, offset = source.arguments
            return sharing.detach().as_strided(shape, stride, offset)
        like = self.value.get()
        return sharing.detach().as_strided(like.shape, like.stride(), 0)

    def get(self) -> Tensor:
        """Return the tensor. RuntimeError if it, or a tensor from which it is computed, was modified in place."""
        if self.is_overwritten:
            raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
        return self.value.get()


class Recipe:
    """How to recompute values: `function(*arguments)`, where some arguments are `Value`s or `Kept`.

    It computes one value, or a list with a tensor for each of `outputs`, the values that a call has saved inside.
    """

    device = "cpu"  # the type of the tensor's device, if it has autocast
    autocast: tuple[bool, torch.dtype | None] = (False, None)  # during the forward pass
    outputs: Sequence[weakref.ref[Value]] = ()
    depth: int  # recipes in the longest chain from kept values to this one
    stream: torch.cuda.Stream | None = None  # on which the tensor was made
    wanted_count = 0  # number of values that it computes and that have consumers
    noted_count: list[int] | None = None  # the same, for a pass that may free the recipe with a part of its graph

    def __init__(self, again: Again, like: Tensor, is_wanted: bool = False):
        """The recipe of a call that has just returned `like`; the result gets its dtype and strides.

        `is_wanted`: the value that it computes has consumers already.
        """
        self.function, self.arguments, self.fresh, self.can_overwrite, _ = again
        self.dtype = like.dtype
        self.stride = like.stride()
        if again.function is not view and (not like.is_cpu or is_any_autocast_enabled()):
            self.device = like.device.type if has_autocast(like.device.type) else "cpu"
            self.autocast = autocast_of(self.device)
            self.stream = current_stream(like)
        if is_wanted:
            self.wanted_count = 1
        depth = 0
        readers = (weakref.ref(self),)
        for value in again.arguments:
            if type(value) is Value:
                source = value.source
                if type(source) is not Recipe:
                    value.readers += readers
                elif source.depth > depth:
                    depth = source.depth
                if is_wanted:  # as `Value.count_consumer` does
                    is_first = not value.consumer_count
                    value.consumer_count += 1
                    if is_first and type(source) is Recipe:
                        source.count_wanted(1)
        self.depth = 1 + depth

    @property
    def inputs(self) -> list[Value]:
        return [argument for argument in self.arguments if type(argument) is Value]

    def count_wanted(self, change: int) -> None:
        """Count a value that gets its first consumer (1) or loses its last (-1). Without any, inputs lose one."""
        self.wanted_count += change
        if self.noted_count is not None:
            self.noted_count[0] = self.wanted_count
        turning = change > 0  # the number at which inputs gain their first consumer, or lose their last
        if self.wanted_count == turning:
            for value in self.arguments:  # as `Value.count_consumer` does
                if type(value) is Value:
                    value.consumer_count += change
                    source = value.source
                    if value.consumer_count == turning and type(source) is Recipe:
                        source.count_wanted(change)

    def compute(self, value: Value, arguments: Sequence[Any], is_over: bool) -> Tensor:
        """The tensor of one of its values. `is_over`: computed in place of the first argument."""
        if self.stream is not None:
            wait_for(self.stream, *arguments)
        function = self.function
        if is_over:
            function = torch.relu_ if function is torch.relu else partial(function, inplace=True)
        if _is_grad_enabled() or self.autocast[0] or is_any_autocast_enabled() or function_modes_on():
            with torch.no_grad(), autocast_as(self.autocast, self.device), without_function_modes():
                result: Any = function(*arguments)
        else:
            result = function(*arguments)
        if not self.outputs:
            result = result if result.dtype is self.dtype else result.to(self.dtype)
            return result if result.stride() == self.stride else laid_out(result, self.stride)
        for reference, tensor in zip(self.outputs, result, strict=True):
            output = reference()
            if output is value:
                wanted_tensor = tensor
            elif output is not None and output.tensor is None and output.source is self:
                output.hold(tensor, output.consumer_count)
        return wanted_tensor


def saved_value(packed: Any) -> Any:
    """The `Value` or `Kept` tensor that our node or PyTorch's holds; None for an absent tensor."""
    if type(packed) is Kept:
        return packed
    if isinstance(packed, Tensor):
        return Kept(packed, None)
    saved = getattr(packed, "saved", packed)  # `_Packed`, in a counted step
    return saved.value if isinstance(saved, Saved) else saved
