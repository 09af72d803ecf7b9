"""Let a network run a step whose effects are put back: with stand-ins for its parameters, before a training."""

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...inputs import tensors_in
from ...saved import PLAIN, is_ordinary
from ...torch_internals import OpOverload, TorchDispatchMode, address, written_arguments

OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass


@contextmanager
def stand_ins(network: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which stand-ins replace a network's parameters and share their memory. Yields the trained stand-ins.

    The parameters themselves get no gradients, so their hooks, optimisers in the backward pass and DDP see nothing. A
    DDP inside calls its module alone. At the end, buffers, attributes of modules and random states are as before, and
    so are the values of parameters that the forward pass has written over, as an embedding with `max_norm` does.
    """
    others: dict[int, Tensor] = {}
    undo: list[tuple[Any, Any, Any]] = []  # dictionary or list, key, value
    attributes = [(vars(module), {**vars(module)}) for module in network.modules()]
    buffers: list[tuple[Tensor, Tensor]] = []  # and copies
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                others.setdefault(id(parameter), _stand_in(parameter))
                undo.append((module._parameters, name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                undo.append((module._buffers, name, buffer))
                buffers.append((buffer, buffer.detach().clone()))
    for module in network.modules():
        for held in [one for one in vars(module).values() if isinstance(one, list)]:  # such as an RNN's weights
            undo += [(held, place, one) for place, one in enumerate(held) if id(one) in others]
    parallel = [module for module in network.modules() if isinstance(module, DistributedDataParallel)]
    drawn, numpy = random.getstate(), sys.modules.get("numpy")
    drawn_by_numpy = None if numpy is None else numpy.random.get_state()
    try:
        for space, key, value in undo:
            space[key] = others.get(id(value), value)
        for module in parallel:
            vars(module)["forward"] = module.module.__call__
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), _Unwritten(network.parameters()):
            yield [other for other in others.values() if other.requires_grad]
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(drawn_by_numpy)
        for space, before in attributes:
            space.clear()
            space.update(before)
        for space, key, value in undo:
            space[key] = value
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


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
