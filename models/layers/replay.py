"""Parts of a forward pass whose activations are dropped, and computed again in the backward pass.

In a `Section` every tensor that autograd would save gets an empty slot. When the backward pass asks for the first, that
part of the network runs again and fills all slots. As the graph is the ordinary one, parameters that are tied, frozen,
unused or not registered, hooks, and gradients of a part work as usual.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .saved import Kept, check_version
from .statistics import has_running_statistics


class _Slot:
    """The place of one saved tensor: empty until the section is repeated."""

    def __init__(self, repeat: Callable[[], None], tensor: Tensor):
        self.repeat = repeat
        self.form = _form(tensor)
        self.tensor: Tensor | None = None
        self.version = 0

    def fill(self, tensor: Tensor) -> None:
        if _form(tensor) != self.form:
            raise RuntimeError(f"{_CHANGED}: it saved a tensor {_form(tensor)}, at first {self.form}")
        self.tensor, self.version = tensor.detach(), tensor._version

    def take(self) -> Tensor:
        if self.tensor is None:
            self.repeat()
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError(f"{_CHANGED}: it saved fewer tensors than at first")
        check_version(tensor, self.version)
        if keeps_graph():
            self.tensor = None  # the next backward pass computes it again
        return tensor


class Section:
    """One part of a forward pass. Autograd holds the slots until it has used or freed them."""

    def __init__(self) -> None:
        self.slots: list[weakref.ref[_Slot]] = []

    def is_asked_for(self) -> bool:
        """Whether some slot is empty that a backward pass may still ask for."""
        return any(slot is not None and slot.tensor is None for slot in (reference() for reference in self.slots))

    @contextmanager
    def dropping(self, repeat: Callable[[], None]) -> Iterator[None]:
        """Context of the first run: saved tensors get slots. `repeat` runs the part again, in `recording`."""

        def pack(tensor: Tensor) -> _Slot | Kept:
            if isinstance(tensor, nn.Parameter):
                return Kept(tensor, None)
            slot = _Slot(repeat, tensor)
            self.slots.append(weakref.ref(slot))
            return slot

        with saved_tensors_hooks(pack, lambda packed: packed.get() if isinstance(packed, Kept) else packed.take()):
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the repetition: saved tensors fill the slots. RuntimeError if they differ in number or form."""
        slots = iter(self.slots)

        def pack(tensor: Tensor) -> None:
            if isinstance(tensor, nn.Parameter):
                return
            reference = next(slots, None)
            if reference is None:
                raise RuntimeError(f"{_CHANGED}: it saved more tensors than at first")
            slot = reference()
            if slot is not None:
                slot.fill(tensor)

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda packed: packed):
            yield


class Environment:
    """Autocast and random numbers at the start of a forward pass, to repeat it."""

    def __init__(self, tensors: Iterable[Tensor], preserve_rng_state: bool = True):
        devices = {tensor.device for tensor in tensors}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)} - {"meta"}
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.cuda = [device for device in devices if device.type == "cuda"]
        self.random = self._random() if preserve_rng_state else None

    def forget_unused_random_numbers(self) -> None:
        """Call it after the forward pass: if it drew no random numbers, their state (5 KB) need not be kept."""
        if self.random is not None and all(map(_equal, self.random, self._random())):
            self.random = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            if self.random is not None:
                stack.enter_context(torch.random.fork_rng(self.cuda))
                torch.set_rng_state(self.random[0])
                for device, state in zip(self.cuda, self.random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield

    def _random(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.cuda)]


@contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Context in which forward passes of some modules leave the running statistics of all their norms as they are."""
    kept = []
    try:
        for norm in (part for module in modules for part in module.modules()):
            if norm.training and has_running_statistics(norm):
                own = {name: values for name in _STATISTICS if (values := norm._buffers.get(name)) is not None}
                kept.append((norm, own))
                norm._buffers.update({name: values.clone() for name, values in own.items()})
        yield
    finally:
        for changed, own in kept:
            changed._buffers.update(own)


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph for another one (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _equal(state: Tensor, other: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():  # the states are real under fake tensors too
        return torch.equal(state, other)


def _form(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


_CHANGED = (
    "a module computed something else when the backward pass repeated its forward pass; it must do the same each time"
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
