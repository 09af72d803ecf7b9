"""Stands in for a CUDA graph on a CPU: records the operators of a function, and runs them again on the same memory.

Like a graph, it keeps the memory of its own results. The program must keep all other tensors that it reads.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Noted(NamedTuple):
    """The memory of a tensor. (Keeping the tensor itself would keep its autograd graph, and so the parameters.)"""

    storage: Callable[[], torch.UntypedStorage | None]
    dtype: torch.dtype
    form: tuple[Any, ...]

    def tensor(self) -> Tensor:
        storage = self.storage()
        assert storage is not None, "a replay reads memory that was freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.addresses: set[int] = set()  # addresses of results' storages

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        noted_arguments = tree_map(self.noted, (args, kwargs or {}))
        result = operator(*args, **(kwargs or {}))
        self.addresses |= _addresses(result) - _addresses((args, kwargs))
        self.calls.append((operator, *noted_arguments, tree_map(self.noted, result)))
        return result

    def noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        storage = leaf.untyped_storage()
        kept = partial(_itself, storage) if storage._cdata in self.addresses else weakref.ref(storage)
        return Noted(kept, leaf.dtype, (leaf.storage_offset(), leaf.shape, leaf.stride()))

    def replay(self) -> None:
        """Run the operators again on the recorded tensors; results go to where the recorded ones lie."""
        with torch.no_grad():
            for call in self.calls:
                operator, args, kwargs, result = tree_map(_as_it_is, call, is_leaf=lambda leaf: isinstance(leaf, Noted))
                again = operator(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)


def _addresses(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _itself(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _as_it_is(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, Noted) else leaf


def recorded_on(network: nn.Module) -> Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]:
    """A `Recorder` of `engine.training.capture`. As in a capture, recording itself changes nothing in the network.

    Meanwhile PyTorch says that it captures.
    """

    def record(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        state = [*network.buffers(), *(p.grad for p in network.parameters() if p.grad is not None)]
        before = [tensor.clone() for tensor in state]
        try:
            with Tape() as tape, pytest.MonkeyPatch.context() as patch:
                for name in ("is_initialized", "is_current_stream_capturing"):
                    patch.setattr(torch.cuda, name, lambda: True)
                return tape.replay, function()
        finally:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)

    return record
