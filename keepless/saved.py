"""`Kept` holds a saved tensor as autograd would. `saved_for_backward` finds the tensors that a graph saves."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .torch_internals import FakeTensor, Hooks, address, has_storage, without_subclasses

T = TypeVar("T")

PLAIN = frozenset([Tensor, nn.Parameter, FakeTensor])


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has a storage and a version counter, unlike sparse, nested, batched and inference tensors.

    Not if it is a subclass that dispatches operators itself: see `adds_metadata`.
    """
    kind = type(tensor)
    return (
        (kind in PLAIN or adds_metadata(kind))
        and has_storage(tensor)
        and not (tensor.is_inference() or tensor.is_nested)
    )


@cache
def adds_metadata(kind: type) -> bool:
    """Whether a tensor subclass only adds metadata, i.e. has ordinary memory and no `__torch_dispatch__` of its own.

    MONAI's MetaTensor is one. What its `__torch_function__` computes besides is recorded, because it calls functions.
    """
    return issubclass(kind, Tensor) and kind not in PLAIN and kind.__torch_dispatch__ == Tensor.__torch_dispatch__


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient, which programs may set: float32 for weights in bfloat16."""
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def gradient_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter's gradient."""
    return parameter.numel() * gradient_dtype(parameter).itemsize


def copied(tensor: Tensor) -> Tensor:
    """A plain copy with equal strides, as kernels round otherwise for others.

    It is one of the whole storage if that is smaller, so that expanded (stride 0) dimensions stay expanded.
    """
    with nullcontext() if type(tensor) in PLAIN else without_subclasses():
        tensor = tensor.detach()
    size = tensor.untyped_storage().nbytes()
    if size >= tensor.nbytes:
        copy = tensor.clone()
        return copy if copy.stride() == tensor.stride() else laid_out(copy, tensor.stride())
    whole = tensor.as_strided((size // tensor.itemsize,), (1,), 0)
    return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def form_of(tensor: Tensor, base: Tensor) -> tuple[Any, ...] | None:
    """How `view` makes a view of its base again; None if values or dtypes differ, or they do not share memory."""
    if tensor.dtype != base.dtype or tensor.is_conj() or tensor.is_neg() or base.is_conj() or base.is_neg():
        return None
    if address(tensor.untyped_storage()) != address(base.untyped_storage()):
        return None
    return base.stride(), tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()


def view(base: Tensor, strides: tuple[int, ...], shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """The same view of a base that was recomputed, perhaps with other strides."""
    base = base if base.stride() == strides else laid_out(base, strides)
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor with these strides: itself, or a copy."""
    dimensions = zip(tensor.stride(), stride, tensor.shape, strict=True)
    if all([ours == wanted or size == 1 for ours, wanted, size in dimensions]):
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    once = tuple([slice(0, 1) if step == 0 else slice(None) for step in stride])  # of what is expanded
    copy[once].copy_(tensor[once])
    return copy


def current_stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """The current stream of a tensor's device; None if it has no streams."""
    is_on_device = tensor.is_cuda and not isinstance(tensor, FakeTensor)
    return torch.cuda.current_stream(tensor.device) if is_on_device else None


def wait_for(stream: torch.cuda.Stream | None, *tensors: Any) -> None:
    """Let the current stream read tensors of another one: an operation's backward pass runs on its forward stream."""
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(current)  # otherwise its memory could be reused too early


def autocast_as(autocast: tuple[bool, torch.dtype | None], device: str) -> AbstractContextManager:
    """Context with the autocast that `autocast_of` has returned."""
    enabled, dtype = autocast
    return nullcontext() if autocast_of(device) == autocast else torch.autocast(device, dtype, enabled)


def autocast_of(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is enabled for a type of device, and if so its dtype."""
    if has_autocast(device) and torch.is_autocast_enabled(device):
        return True, torch.get_autocast_dtype(device)
    return False, None


@cache
def has_autocast(device: str) -> bool:
    """Whether a type of device has autocast; meta, for example, does not."""
    return torch.amp.is_autocast_available(device)


class ByStorage(Generic[T]):
    """A mapping from storages that exist. Entries of freed ones are not found, even if their address is reused.

    No callback runs when one is freed, because Python would swallow a Ctrl-C there.
    """

    def __init__(self) -> None:
        self.by_address: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def get(self, storage: torch.UntypedStorage) -> T | None:
        reference, value = self.by_address.get(address(storage), (None, None))
        return value if reference is not None and reference() is storage else None

    def put(self, storage: torch.UntypedStorage, value: T) -> T:
        self.by_address[address(storage)] = weakref.ref(storage), value
        return value

    def pop(self, storage: torch.UntypedStorage) -> T | None:
        value = self.get(storage)
        self.by_address.pop(address(storage), None)
        return value

    def clear(self) -> None:
        self.by_address.clear()


class Gone(weakref.ref[Any]):
    """Appends itself to `events` when an object is freed. (In a callback in Python, a Ctrl-C would be swallowed.)"""

    __slots__ = ("event",)

    def __new__(cls, referent: Any, events: list[Any], event: Any) -> "Gone":
        return super().__new__(cls, referent, events.append)

    def __init__(self, referent: Any, events: list[Any], event: Any) -> None:
        super().__init__(referent, events.append)  # type: ignore[call-arg]  # as weakref.KeyedRef does
        self.event = event


class Kept:
    """A tensor kept as autograd would keep it: packed by `hooks`, if any, and refused if it was modified in place.

    Autograd checks no versions under hooks. Here a tensor that they return after the original was modified is refused
    if it shares the original's memory, as with `save_on_cpu` on a CPU, or has a later version itself: a checkpoint
    repeats the modification too. Copies pass.
    """

    __slots__ = ("counter", "hooks", "packed", "place", "storage", "version", "__weakref__")

    name = "a tensor"  # with which the message of a modified one begins

    def __init__(self, tensor: Tensor, hooks: Hooks | None, detaches: bool = True):
        """`detaches`: from its graph, with which an operation's own output would keep itself alive."""
        self.version = tensor._version
        self.hooks = hooks
        if type(tensor) not in PLAIN and adds_metadata(type(tensor)):
            with without_subclasses():
                tensor = tensor.detach()
        self.packed: Any = tensor.detach() if detaches and not tensor.is_leaf else tensor
        if hooks is not None:
            self._pack(tensor, hooks)

    def _pack(self, tensor: Tensor, hooks: Hooks) -> None:
        self.counter: Tensor | None = None  # shares the memory's version
        self.storage: weakref.ref[torch.UntypedStorage] | None = None
        with torch.no_grad():
            self.packed = hooks[0](tensor)
        if is_ordinary(tensor):
            self.counter = tensor.detach()
            self.counter.data = tensor.new_empty(0)  # keeps the version counter, but not the memory
            self.storage = weakref.ref(tensor.untyped_storage())
            self.place = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def is_modified(self) -> bool:
        """Whether the memory was modified since it was kept."""
        counter = self.packed if self.hooks is None else self.counter
        return counter is not None and bool(counter._version != self.version)

    def original(self, sharing: Tensor) -> Tensor:
        """The tensor, made from one that shares its memory; a checkpoint's hook would run its part again."""
        if self.hooks is None:
            return self.get()
        dtype, shape, stride, offset = self.place
        with torch.no_grad():
            empty = torch.empty(0, dtype=dtype, device=sharing.device)
            return empty.set_(sharing.untyped_storage(), offset, shape, stride)

    def is_freed(self) -> bool:
        """Whether the original's memory is gone: the hooks have put the values elsewhere."""
        return self.hooks is not None and self.storage is not None and self.storage() is None

    def get(self) -> Tensor:
        """The tensor. RuntimeError if it was modified in place."""
        tensor: Tensor = self.packed
        if self.hooks is None:
            if tensor._version != self.version:
                raise modified_error(self.name, tensor, tensor._version, self.version)
            return tensor
        tensor = self.hooks[1](self.packed)
        if self.counter is not None and self.is_modified() and is_ordinary(tensor):
            assert self.storage is not None
            if self.storage() is tensor.untyped_storage() or tensor._version > self.version:
                raise modified_error(self.name, tensor, self.counter._version, self.version)
        return tensor


def check_version(tensor: Tensor, version: int, name: str = "a tensor") -> None:
    """Raise RuntimeError if a tensor was modified in place since it had this version. `name` begins the message."""
    if tensor._version != version:
        raise modified_error(name, tensor, tensor._version, version)


def modified_error(name: str, tensor: Tensor, version: int, expected: int) -> RuntimeError:
    shape = None if tensor.is_nested else tuple(tensor.shape)
    return RuntimeError(
        f"{name} of shape {shape} needed for the gradient was modified by an inplace operation: it is at "
        f"version {version}, expected version {expected}"
    )


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor, saved in its place if the gradient does not need its values.

    PyTorch's `tree_map` sees it as a leaf.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def size(self) -> int:
        """Bytes of its memory, from its first value to its last."""
        return self.dtype.itemsize * self.span

    @property
    def span(self) -> int:
        """Entries in memory, from the first one to the last; 0 if the tensor is empty."""
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)]
        return 1 + sum(steps) if all(self.shape) else 0

    def get(self) -> Tensor:
        """A tensor with arbitrary values. The same strides select the same algorithm."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def ones(self) -> Tensor:
        """A tensor of ones; of zeros if it holds integers, which may be indices."""
        value = 1 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        entries = torch.full((self.span,), value, dtype=self.dtype, device=self.device)
        return entries.as_strided(self.shape, self.stride)


def saved_for_backward(forward: Callable[[], T], without: Iterable[Tensor] = ()) -> tuple[T, list[Tensor]]:
    """Run a forward pass; return its result, which must hold the graph, and a tensor for each storage that it saves.

    Tensors may be fake. The storages of the tensors `without`, e.g. parameters, are left out; so is what autograd has
    already dropped, e.g. between two reversible modules.
    """
    references: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        detached = tensor.detach()  # with its graph, an operation's own output would keep itself alive
        references.append(weakref.ref(detached))
        return detached

    with saved_tensors_hooks(pack, lambda packed: packed):
        result = forward()
    left_out = {address(tensor.untyped_storage()) for tensor in without}
    saved = [tensor for tensor in [reference() for reference in references] if tensor is not None]
    by_address = {address(tensor.untyped_storage()): tensor for tensor in saved}
    return result, [tensor for place, tensor in by_address.items() if place not in left_out]


def kept_bytes(network: nn.Module, forward: Callable[[], object], inputs: Iterable[Tensor] = ()) -> int:
    """Bytes that the graph of a forward pass saves, without the network's parameters and inputs.

    The result of `forward` must hold the graph, e.g. the loss or the outputs.
    """
    result, saved = saved_for_backward(forward, [*network.parameters(), *inputs])
    return sum(tensor.untyped_storage().nbytes() for tensor in saved)
