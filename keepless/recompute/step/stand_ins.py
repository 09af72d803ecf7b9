"""Let a network run a step whose effects are put back: with stand-ins for its parameters, before a training."""

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...saved import PLAIN

OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass


@contextmanager
def stand_ins(network: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which a network has other parameters, in the memory of its own. Yields those that are trained.

    Its own get no gradients, so their hooks, optimisers in the backward pass and DDP see nothing; a DDP inside calls
    its module alone. At the end, buffers and random states are as before.
    """
    others: dict[int, Tensor] = {}
    undo: list[tuple[Any, Any, Any]] = []  # dictionary or list, key, value
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
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield [other for other in others.values() if other.requires_grad]
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(drawn_by_numpy)
        for module in parallel:
            del vars(module)["forward"]
        for space, key, value in undo:
            space[key] = value
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _stand_in(parameter: Tensor) -> Tensor:
    """Another parameter in the same memory."""
    if type(parameter) not in PLAIN:
        return copy.copy(parameter)
    other = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(other).update({name: one for name, one in vars(parameter).items() if name != OPTIMIZERS})
    if parameter.is_leaf and parameter.grad_dtype != parameter.dtype:
        other.grad_dtype = parameter.grad_dtype
    return other
