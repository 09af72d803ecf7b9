"""Forward passes on an example, which show the functions that read each norm's output."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..inputs import tensors_in
from ..norms.abn import ABN
from ..norms.statistics import with_attributes
from ..torch_internals import BatchNormBase, StorageWeakRef, tree_map, without_function_modes
from .activated import METADATA, is_customised

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh)  # modules that take one tensor

Example = Tensor | tuple[Any, ...]
Storage = StorageWeakRef | None  # None for a tensor without one, e.g. a sparse one


class Reader(NamedTuple):
    """A function of PyTorch that got a tensor, and the innermost module that called it."""

    function: str
    module: nn.Module

    @property
    def is_layer(self) -> bool:
        """Whether the module does nothing but call the function, like nn.ReLU6."""
        return type(self.module).__module__.startswith("torch.nn.") and not self.module._modules

    def __str__(self) -> str:
        name = type(self.module).__name__
        return name if self.is_layer else f"{self.function} in {name}"


@dataclass
class NormCall:
    """One call of a norm, and the readers and writers of its output."""

    may_include: bool = True  # whether an activation can be merged; this package's norms have their own
    activations: list[nn.Module] = field(default_factory=list)  # activation modules that got the output, if it can
    readers: list[Reader] = field(default_factory=list)  # everything else that got the output, or a view of it
    writer: Reader | None = None  # overwrote the output, or the result of the activation
    is_returned: bool = False  # whether the network returns it, without an activation


def calls_on_example(network: nn.Module, example: Example) -> dict[nn.Module, list[NormCall]]:
    """Run a network in training and in evaluation mode, and record every call of its norms.

    The modules keep their buffers, attributes, modes and hooks, and the random states of PyTorch and Python are
    restored. Only changes to Parameters, and to objects outside the modules, remain.

    Args:
        network: any that runs eagerly.
        example: its input, or a tuple of its positional arguments.

    Raises:
        ValueError: the example is not a tensor or tuple; the network raises on it, or has scripted or lazy modules.
    """
    if not isinstance(example, (Tensor, tuple)):
        raise ValueError(
            f"example is a {type(example).__name__}: expected a tensor, or a tuple of the positional arguments of the "
            f"network"
        )
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'the network'} is scripted: convert the network before torch.jit.script")
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise ValueError(f"{name or 'the network'} does not know its sizes yet: run the network once first")
    args = example if isinstance(example, tuple) else (example,)
    calls: dict[nn.Module, list[NormCall]] = {
        module: [] for module in network.modules() if isinstance(module, (BatchNormBase, ABN))
    }
    activations = {module for module in network.modules() if type(module) in ACTIVATIONS and not is_customised(module)}
    for training in (True, False):
        with _unchanged(network, args):
            observer = _Observer(calls, activations)
            try:
                observer.run(network.train(training), args)
            except Exception as error:  # a network may raise anything
                shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in(args))
                raise ValueError(
                    f"the network raises {type(error).__name__} in {'training' if training else 'evaluation'} mode on "
                    f"an example of shape {shapes}: {error}; give an example on which it runs in both modes"
                ) from error
    return calls


@contextmanager
def _unchanged(network: nn.Module, args: tuple[Any, ...]) -> Iterator[None]:
    """Context in which the modules have copies of their attributes and buffers; the copies are dropped at the end."""
    buffers = {buffer: buffer.detach().clone() for buffer in network.buffers()}
    attributes = {}
    for module in network.modules():
        copied = {
            name: copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value
            for name, value in vars(module).items()
        }
        own = {name: None if value is None else buffers[value] for name, value in module._buffers.items()}
        attributes[module] = {**copied, "_buffers": own}
    devices = {x.device for x in tensors_in((args, list(network.parameters()))) if x.is_cuda}
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(list(devices)), with_attributes(attributes):
            yield
    finally:
        random.setstate(python_state)


class _Observer(TorchFunctionMode):
    """Sees every function of PyTorch that gets a norm's output."""

    def __init__(self, calls: dict[nn.Module, list[NormCall]], activations: set[nn.Module]):
        super().__init__()
        self.calls, self.activations = calls, activations
        self.running: list[nn.Module] = []  # from the network to the innermost module
        self.activating: NormCall | None = None  # whose output one of `activations` is reading
        # By storage, because views share it. While a weak reference exists, its address is not reused.
        self.outputs: dict[Storage, NormCall] = {}
        self.activated: dict[Storage, NormCall] = {}
        self.owners: dict[Tensor, nn.Module] = {}  # norms by their Parameters and buffers

    def run(self, network: nn.Module, args: tuple[Any, ...]) -> None:
        """Call the network on copies of `args`, and note the readers of each norm's output."""
        for module in network.modules():
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave, always_call=True)
        self.owners = {tensor: norm for norm in self.calls for tensor in (*norm.parameters(), *norm.buffers())}
        copies = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self:
            result = network(*copies)
        for tensor in tensors_in(result):
            if call := self.outputs.get(_storage_of(tensor)):
                call.is_returned = True

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        if name == "__get__":  # of an attribute of tensors
            name = function.__self__.__name__  # type: ignore[attr-defined]
        if name in METADATA or not self.running:
            return function(*args, **kwargs)
        reader = Reader(name, self.running[-1])
        tensors = tensors_in((args, kwargs))
        if name == "batch_norm":  # called by another module: `norm.forward(x)`, or a function with the norm's tensors
            for norm in {self.owners[tensor] for tensor in tensors if tensor in self.owners} - {reader.module}:
                self.calls[norm].append(NormCall(readers=[Reader("forward", reader.module)]))
        seen = []
        for tensor in tensors:
            storage = _storage_of(tensor)
            before, after = self.outputs.get(storage), self.activated.get(storage)
            call = before or after
            if call is not None and call is not self.activating:
                seen.append((call, tensor, tensor._version))
                if before is not None:
                    before.readers.append(reader)
        result = function(*args, **kwargs)
        for call, tensor, version in seen:
            if tensor._version != version:
                call.writer = call.writer or reader
        return result

    def enter(self, module: nn.Module, args: tuple) -> None:
        """Before a module's forward pass: note if an activation gets a norm's output."""
        self.running.append(module)
        if module in self.activations and len(args) == 1 and isinstance(args[0], Tensor):
            call = self.outputs.get(_storage_of(args[0]))
            if call is not None and call.may_include:  # for a view, it will not be the only reader
                call.activations.append(module)
                self.activating = call

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """After a module's forward pass: note the output of a norm or an activation. Returns a replacement or None."""
        self.running.pop()
        call, self.activating = self.activating, None
        if not isinstance(output, Tensor):
            return None
        if call is not None:
            if _storage_of(output) in self.outputs:  # it ran in place: a copy has other readers
                with without_function_modes():
                    output = output.clone()
            self.activated[_storage_of(output)] = call
            return output
        if module in self.calls:
            call = NormCall(may_include=not isinstance(module, ABN))
            self.calls[module].append(call)
            self.outputs[_storage_of(output)] = call
        return None


def _storage_of(tensor: Tensor) -> Storage:
    with without_function_modes():
        return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None
