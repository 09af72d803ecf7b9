"""Parts of a forward pass whose activations are dropped, and recomputed in the backward pass.

In a `Section` every tensor that autograd would save gets an empty slot. When the backward pass reads the first slot,
the part runs again and fills all slots. Autograd's graph is unchanged, so hooks, gradients of parts, and tied, frozen,
unused or unregistered parameters work as usual.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..saved import Kept, check_version, current_stream, wait_for
from ..torch_internals import keeps_graph


class _Slot:
    """The place of one saved tensor: empty until the section is repeated."""

    def __init__(self, repeat: Callable[[], None], tensor: Tensor):
        self.repeat = repeat
        self.metadata = _metadata(tensor)
        self.tensor: Tensor | None = None
        self.version = 0
        self.stream: torch.cuda.Stream | None = None  # that filled it

    def fill(self, tensor: Tensor) -> None:
        if _metadata(tensor) != self.metadata:
            raise RuntimeError(f"{_CHANGED}: it saved a tensor {_metadata(tensor)}, but at first {self.metadata}")
        self.tensor, self.version, self.stream = tensor.detach(), tensor._version, current_stream(tensor)

    def take(self) -> Tensor:
        """The tensor; an empty slot repeats its section first. RuntimeError if the repetition differed."""
        if self.tensor is None:
            self.repeat()
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError(f"{_CHANGED}: it saved fewer tensors than at first")
        check_version(tensor, self.version)
        wait_for(self.stream, tensor)  # a part that ran on several streams is repeated on the first that reads
        if keeps_graph():
            self.tensor = None  # the next backward pass computes it again
        return tensor


class Section:
    """One part of a forward pass. Autograd holds its slots until it has used or freed them."""

    def __init__(self) -> None:
        self.slots: list[weakref.ref[_Slot]] = []

    def is_needed(self) -> bool:
        """Whether a backward pass may still read an empty slot."""
        return any(slot is not None and slot.tensor is None for slot in (reference() for reference in self.slots))

    @contextmanager
    def dropping(self, repeat: Callable[[], None]) -> Iterator[None]:
        """Context of the first run: saved tensors get slots. `repeat` runs the part again, in `filling`."""
        ended = False

        def pack(tensor: Tensor) -> _Slot | Kept:
            if isinstance(tensor, nn.Parameter):
                return Kept(tensor, None)
            slot = _Slot(repeat, tensor)
            self.slots.append(weakref.ref(slot))
            return slot

        def unpack(packed: _Slot | Kept) -> Tensor:
            if not ended:
                raise RuntimeError(
                    "a branch of a reversible module computes gradients in its forward pass, but its activations are "
                    "already dropped: give disable=True to keep them"
                )
            return packed.get() if isinstance(packed, Kept) else packed.take()

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            ended = True

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Context of the repetition: saved tensors fill the slots. RuntimeError if they differ in number or metadata.

        The graph made here cannot be differentiated after the context has ended.
        """
        slots, ended = iter(self.slots), False

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                reference = next(slots, None)
                if reference is None:
                    raise RuntimeError(f"{_CHANGED}: it saved more tensors than at first")
                slot = reference()
                if slot is not None:
                    slot.fill(tensor)
            return tensor.detach()

        def unpack(tensor: Tensor) -> Tensor:
            if ended:
                raise RuntimeError(
                    "a value that a branch of a reversible module stored elsewhere was differentiated after the branch "
                    "had run again in a backward pass: differentiate only what the module returns"
                )
            return tensor

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                yield
        finally:
            ended = True
        if next(slots, None) is not None:
            raise RuntimeError(f"{_CHANGED}: it saved fewer tensors than at first")


def _metadata(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


_CHANGED = "a module did something else when the backward pass repeated its forward pass; it must do the same each time"
