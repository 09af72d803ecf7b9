"""Count a dry step: of a copy of a network, on fake tensors."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...inputs import Network, tensors_in
from ...saved import TensorSpec, gradient_dtype, is_ordinary
from ...torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    address,
    forget_originals,
    simulated_collective,
    with_dispatch_modes_off,
    without_cached_weights,
)
from .sharded import add_copies_without_fsdp2, attributes_without_fsdp2, is_sharded
from .stand_ins import stand_ins
from .step import Step
from .watch import State, Watch, WatchedRecording, differentiable, has_values

T = TypeVar("T")
_log = logging.getLogger(__name__)
_INSTEAD = "recompute_activations(network, budget=…, example=…) watches a step of the network itself"


class Loss(torch.autograd.Function):
    """A loss of 0 bytes, which gives each of its input tensors a gradient that exists until it has been read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.specs = [TensorSpec.from_tensor(tensor) for tensor in tensors]
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # one for each tensor
        return tuple(spec.get() for spec in ctx.specs)


def counted_step(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    measures: bool = False,
    copy_parameters: bool = False,
) -> Step:
    """Run a step of a network without gradients, on real or fake tensors, and count it. It changes buffers.

    The loss is the mean squares of outputs; a `Loss` where nothing is measured, for planners that count it themselves.
    `measures`: see `Allocations`; always on for real tensors. `copy_parameters`: see `Recording`.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    is_estimated = is_fake and not measures
    watch = Watch(inputs, not is_estimated, copy_parameters)
    watch.watch_gradients(parameters)
    leaves = [tensor for tensor in [*parameters, *inputs] if tensor.requires_grad and tensor.is_leaf]
    try:
        with WatchedRecording(watch):
            outputs = network(*args, **kwargs)
        with watch.allocations:
            watch.forward_ends(tensors_in(outputs))
            starts = differentiable(outputs)
            losses = [Loss.apply(*starts)] if is_estimated else [start.square().mean() for start in starts]
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses], inputs=leaves)
            del outputs, starts, losses
    finally:
        watch.end(State.COUNTED)
    return watch.step(network)


def dry_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The calls and memory of a network's step with these arguments, from one step of a copy.

    It runs under the modes of the caller, such as autocast. Raises what `on_copy` raises.
    """
    measures = has_values([*tensors_in((args, kwargs)), *network.parameters()])
    return on_copy(partial(counted_step, measures=measures, copy_parameters=is_sharded(network)), network, args, kwargs)


def rehearsed_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """As `dry_step`. If that raises an error, as in a network that reads values, from a step of the network itself."""
    try:
        return dry_step(network, args, kwargs)
    except Exception as error:  # a network may raise anything
        if is_sharded(network) or not has_values([*tensors_in((args, kwargs)), *network.parameters()]):
            raise
        _log.info("the step does not run on fake tensors: %s", text_of(error))
    with stand_ins(network, tensors_in((args, kwargs))):
        return counted_step(network, args, kwargs)


def text_of(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"


class _DryMode(FakeTensorMode):
    """A fake tensor mode whose tensors raise an error if they are used after it has ended."""

    has_ended = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_ended:
            raise RuntimeError(
                f"{function} reads a fake tensor, which code outside the network has kept in a dry step (of "
                f"keepless.plan or keepless.fit): clear its caches, or call them in a program of their own"
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


class _IsolatingMode(TorchDispatchMode):
    """Sends nothing to other processes, and refuses operators that read the tensors of the network itself."""

    def __init__(self, network: nn.Module):
        super().__init__()
        tensors = [*network.parameters(), *network.buffers()]
        self.storages = [tensor.untyped_storage() for tensor in tensors if is_ordinary(tensor)]
        self.addresses = set(map(address, self.storages))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            return simulated_collective(function, args)
        for tensor in tensors_in((args, kwargs)):
            if is_ordinary(tensor) and address(tensor.untyped_storage()) in self.addresses:
                raise RuntimeError(
                    f"{function} reads a tensor of the network itself: a function refers to it that its copy shares, "
                    f"such as a `forward` that was wrapped; {_INSTEAD}"
                )
        return function(*args, **(kwargs or {}))


def on_copy(run: Callable[[Network, Any, Any], T], network: Network, args: Any, kwargs: Any) -> T:
    """Call `run` with copies of a network and its arguments, on fake tensors, and return its result.

    `copy.deepcopy` makes the copies. Python code of the network runs once, and what it changes outside of the network
    stays changed. Meta tensors become fake CPU tensors. Random states are put back. The copy does not communicate with
    other processes: what they would send is taken to equal its own tensors.

    Raises:
        RuntimeError: the copy reads tensors of the network itself; the network cannot be copied.
        Exception: whatever `run` raises.
    """
    tensors = [*network.parameters(), *network.buffers(), *tensors_in((args, kwargs))]
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else _DryMode(allow_non_fake_inputs=True)
    memo = _fakes_by_id(mode, network, tensors)
    sharded = add_copies_without_fsdp2(network, mode, memo)
    try:
        with with_dispatch_modes_off():
            copied = _deep_copies(network, args, kwargs, sharded, memo)
            with _program_state_kept(), without_cached_weights(), mode, _IsolatingMode(network):
                return run(*copied)
    finally:
        if isinstance(mode, _DryMode):
            mode.has_ended = True
            forget_originals(mode)  # programs cannot swap parameters that have weak references


def _deep_copies(
    network: Network, args: Any, kwargs: Any, sharded: list[tuple[nn.Module, nn.Module]], memo: dict[int, Any]
) -> tuple[Network, Any, Any]:
    """Copy a network and its arguments. RuntimeError if that is impossible.

    Copies of DDP call their module alone. `sharded`: modules of FSDP2, each with an empty copy in the `memo`.
    """
    parallel = [module for module in network.modules() if isinstance(module, DistributedDataParallel)]
    memo |= {id(module): object.__new__(DistributedDataParallel) for module in parallel}
    try:
        for module, empty in sharded:
            vars(empty).update(copy.deepcopy(attributes_without_fsdp2(module), memo))
        for module in parallel:
            attributes = {name: vars(module)[name] for name in vars(nn.Module())}
            copied_module = memo[id(module)]
            vars(copied_module).update(copy.deepcopy(attributes, memo))
            vars(copied_module)["forward"] = copied_module.module.__call__  # it does not communicate
        copied = copy.deepcopy((network, args, kwargs), memo)
    except Exception as error:
        raise RuntimeError(f"the network cannot be copied for a dry step ({text_of(error)}); {_INSTEAD}") from error
    for new_parameter, parameter in zip(copied[0].parameters(), network.parameters(), strict=True):
        if new_parameter.is_leaf and new_parameter.grad_dtype != gradient_dtype(parameter):
            new_parameter.grad_dtype = gradient_dtype(parameter)
    return copied


def _fakes_by_id(mode: FakeTensorMode, network: nn.Module, tensors: Sequence[Tensor]) -> dict[int, Any]:
    """Fake tensors like these, by the ids of these; those of a network's parameters are parameters."""
    fakes = {id(tensor): _fake_like(mode, tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors}
    for parameter in network.parameters():
        fakes[id(parameter)] = nn.Parameter(fakes[id(parameter)].detach(), parameter.requires_grad)
    return fakes


def _fake_like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like this one, with memory of its own; on the CPU if this one is on meta."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    if tensor.layout is not torch.strided:
        return tensor.clone()
    device = "cpu" if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _program_state_kept() -> Iterator[None]:
    """Context for running a copy: restores random states, and PyTorch does not log what fake tensors cannot do."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled = log.disabled
    log.disabled = True
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        log.disabled = was_disabled
