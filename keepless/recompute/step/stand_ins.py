"""Watch a step of a network whose effects are put back: with stand-ins for its parameters, before a training."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...inputs import tensors_in
from ...saved import PLAIN, is_ordinary
from ...torch_internals import OpOverload, TorchDispatchMode, address, without_cached_weights, written_arguments
from .snapshot import Snapshot
from .watch import Watch, differentiable, watched_pass

OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass


def watch_of_example(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Watch a step of a network on an example, with the mean square of the outputs as its loss. It changes nothing."""
    inputs = tensors_in((args, kwargs))
    with stand_ins(network, inputs) as trained:
        recording = watched_pass(network, inputs, None)
        with recording:
            outputs = network(*args, **kwargs)
        losses = [start.square().mean() for start in differentiable(outputs)]
        recording.watch.await_backward(network, outputs)
        leaves = [*trained, *(tensor for tensor in inputs if tensor.requires_grad and tensor.is_leaf)]
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses], inputs=leaves)
        del outputs, losses
    return recording.watch


@contextmanager
def stand_ins(network: nn.Module, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Context in which stand-ins replace a network's parameters and share their memory. Yields the trained stand-ins.

    The parameters themselves get no gradients, so their hooks, optimisers in the backward pass and DDP see nothing. A
    DDP inside calls its module alone. At the end, inputs, buffers, attributes of modules and random states are as
    before, and so are the values of parameters that the forward pass has written over, as an embedding with `max_norm`
    does.
    """
    before = Snapshot(network, inputs, has_values=False)
    replacements: dict[int, Tensor] = {}  # by the ids of the parameters
    try:
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    vars(module)["_parameters"][name] = replacements.setdefault(id(parameter), _stand_in(parameter))
        for module in network.modules():
            for value in vars(module).values():
                if isinstance(value, list):  # such as an RNN's weights
                    value[:] = [replacements.get(id(member), member) for member in value]
            if isinstance(module, DistributedDataParallel):
                vars(module)["forward"] = module.module.__call__
        with _Unwritten(replacements.values()), without_cached_weights():
            yield [stand_in for stand_in in replacements.values() if stand_in.requires_grad]
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
        for position, name in written_arguments(function):
            argument = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in filter(is_ordinary, tensors_in(argument)):
                key = address(tensor.untyped_storage())
                if key in self.storages and key not in self.copies:
                    self.copies[key] = self.storages[key].clone()
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for key, copied in self.copies.items():
            self.storages[key].copy_(copied)


def _stand_in(parameter: Tensor) -> Tensor:
    """Another parameter in the same memory."""
    if type(parameter) not in PLAIN:
        return copy.copy(parameter)
    stand_in = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(stand_in).update({name: value for name, value in vars(parameter).items() if name != OPTIMIZERS})
    if parameter.is_leaf and parameter.grad_dtype != parameter.dtype:
        stand_in.grad_dtype = parameter.grad_dtype
    return stand_in
