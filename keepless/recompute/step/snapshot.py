"""The state of a network before steps that are not the program's own, to be put back."""

import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in

_CONTAINERS = frozenset([dict, list, set, deque, OrderedDict, defaultdict])


class Snapshot:
    """The state of a network and its inputs, and of random generators. Values of tensors are copied to the CPU.

    Attributes of modules are followed into lists, dictionaries, sets and deques, but not into other objects.
    `has_values`: copy the values of parameters, and of gradients, too.
    """

    def __init__(self, network: nn.Module, inputs: Any, has_values: bool = True):
        self.containers: dict[int, tuple[Any, Any]] = {}  # by id, each with a copy
        self.generators: dict[torch.Generator, Tensor] = {}
        tensors = {id(tensor): tensor for tensor in tensors_in(inputs)}
        pending: list[Any] = [vars(module) for module in network.modules()]
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor):
                tensors[id(value)] = value
            elif isinstance(value, torch.Generator):
                self.generators[value] = value.get_state()
            elif type(value) in _CONTAINERS and id(value) not in self.containers:
                self.containers[id(value)] = value, value.copy()
                pending += value.values() if isinstance(value, dict) else value
        self.gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
        if has_values:
            stored = [tensor for pair in self.gradients for tensor in pair if tensor is not None]
        else:
            stored = [tensor for tensor in tensors.values() if not isinstance(tensor, nn.Parameter)]
        self.values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in stored]
        self.random = _random_states()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the state back, in the same objects."""
        for container, members in self.containers.values():
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(members)
            else:
                container.update(members)
        for tensor, gradient in self.gradients:
            tensor.grad = gradient
        for tensor, values in self.values:
            if not torch.equal(tensor.detach().cpu(), values):
                tensor.copy_(values)
        for generator, state in self.generators.items():
            generator.set_state(state)
        (on_cpu, *on_cuda), python, numpy = self.random
        torch.set_rng_state(on_cpu)
        torch.cuda.set_rng_state_all(on_cuda)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def _random_states() -> tuple[list[Tensor], Any, Any]:
    """The random states of PyTorch (of the CPU, then of CUDA devices), of Python, and of NumPy if it is imported."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), *on_cuda], random.getstate(), numpy and numpy.random.get_state()


def random_state() -> Tensor:
    """The states of all global random generators as one tensor, to be compared."""
    devices, python, numpy = _random_states()
    text = pickle.dumps([*(bytes(state.tolist()) for state in devices), python, numpy])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
