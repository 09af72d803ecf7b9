"""Let a network run a step whose effects are put back: with stand-ins for its parameters, before a training."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...inputs import tensors_in
from ...saved import PLAIN, is_ordinary
from ...torch_internals import OpOverload, TorchDispatchMode, address, written_arguments
from .snapshot import Snapshot

OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass


@contextmanager
def stand_ins(network: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which stand-ins replace a network's parameters and share their memory. Yields the trained stand-ins.

    The parameters themselves get no gradients, so their hooks, optimisers in the backward pass and DDP see nothing. A
    DDP inside calls its module alone. At the end, buffers, attributes of modules and random states are as before, and
    so are the values of parameters that the forward pass has written over, as an embedding with `max_norm` does.
    """
    before, others = Snapshot(network, (), has_values=False), dict[int, Tensor]()
    try:
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    vars(module)["_parameters"][name] = others.setdefault(id(parameter), _stand_in(parameter))
        for module in network.modules():
            for held in [one for one in vars(module).values() if isinstance(one, list)]:  # such as an RNN's weights
                held[:] = [others.get(id(one), one) for one in held]
            if isinstance(module, DistributedDataParallel):
                vars(module)["forward"] = module.module.__call__
        with _Unwritten(others.values()):
            yield [other for other in others.values() if other.requires_grad]
    finally:
        before.restore()


class _Unwritten(TorchDispatchMode):
    """Context at whose end parameters have the values from before it."""

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__()
        storages = [parameter.untyped_storage() for parameter in parameters if is_ordinary(parameter)]
        self.storages = {address(storage): storage for storage in storages}
        self.copies: dict[int, torch.UntypedStorage] = {}  # of storages that were written over, by their addresses

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, name in written_arguments(function):
            for one in tensors_in(args[place] if place < len(args) else (kwargs or {}).get(name)):
                written = address(one.untyped_storage()) if is_ordinary(one) else 0
                if written in self.storages and written not in self.copies:
                    self.copies[written] = self.storages[written].clone()
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for written, before in self.copies.items():
            self.storages[written].copy_(before)


def _stand_in(parameter: Tensor) -> Tensor:
    """Another parameter in the same memory."""
    if type(parameter) not in PLAIN:
        return copy.copy(parameter)
    other = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(other).update({name: one for name, one in vars(parameter).items() if name != OPTIMIZERS})
    if parameter.is_leaf and parameter.grad_dtype != parameter.dtype:
        other.grad_dtype = parameter.grad_dtype
    return other
