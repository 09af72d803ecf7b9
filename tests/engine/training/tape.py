"""Stands in for a CUDA graph on a CPU: records the operators of a function, and runs them again on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run the operators again on the recorded tensors; results go to where the recorded ones lie."""
        with torch.no_grad():
            for operator, args, kwargs, result in self.calls:
                again = operator(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)


def recorded_on(network: nn.Module) -> Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]:
    """A `Recorder` of `engine.training.capture`. As in a capture, recording itself changes nothing in the network."""

    def record(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        state = [*network.buffers(), *(p.grad for p in network.parameters() if p.grad is not None)]
        before = [tensor.clone() for tensor in state]
        with Tape() as tape:
            result = function()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        return tape.replay, result

    return record
