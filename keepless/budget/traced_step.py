"""Trace a step of a network on given arguments: in place, or as a rehearsal on fake tensors and a copy of the network.

Neither changes the network.
"""

import copy
import logging
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..inputs import Network, tensors_in
from ..recompute.recording import Recording
from ..torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves, with_dispatch_modes_off
from .costs import seconds_of
from .estimates import Estimates
from .execution import ByPlan
from .step import Step
from .trace import Progress, StepTrace

# Threads that enter and leave dispatch modes at the same time leave PyTorch's flag of them behind.
_one_at_a_time = threading.RLock()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def traced_step(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], estimates: Estimates | None = None
) -> tuple[Step, float]:
    """A step of a network, and the seconds that it takes; 0 on fake tensors. `estimates`: see `StepTrace`.

    Gradients, buffers and the random state are then as before.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers() if not _is_expanded(buffer)]
    registered = [(module, dict(module._buffers)) for module in network.modules()]
    device = next((tensor.device for tensor in [*inputs, *parameters]), torch.device("cpu"))
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    trace, seconds = StepTrace(estimates), 0.0

    def run(policy: ByPlan | None) -> None:
        """A forward and a backward pass."""
        with Recording(policy, inputs=inputs) as recording:
            outputs = tensors_in(network(*args, **kwargs))
        outputs = [output for output in outputs if output.requires_grad and output.is_floating_point()]
        if not outputs:
            raise ValueError("no output needs a gradient: expected a network in training, outside torch.no_grad()")
        if policy is not None:
            trace.watch_backward(outputs, recording.known.start)
        losses = backward_starts(outputs)
        torch.stack([output.float().square().mean() for output in losses]).sum().backward()

    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=not is_fake):
            if not is_fake:
                run(None)  # warms up
                seconds = seconds_of(lambda: run(None), device)[1]
            run(ByPlan(trace=trace))
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, of_module in registered:  # it may have assigned others
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if trace.progress() != Progress.ENDED:
        raise ValueError("the step could not be traced: call plan outside saved-tensor hooks and checkpoints")
    return trace.step(), seconds


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one of them is a loss, the outputs that it is computed from are left out.

    A loss has no dimensions. Networks of Hugging Face return theirs together with the logits.
    """
    pending: list[Any] = [output.grad_fn for output in outputs if output.dim() == 0 and output.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = [node for node, _ in pending.pop().next_functions if node is not None and node not in seen]
        seen.update(following)
        pending += following
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether entries share memory, as in an expanded tensor, which cannot be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rehearsed_step(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], estimates: Estimates | None
) -> Step:
    """The step of a network with these arguments, as far as its calls and its memory go. `estimates`: see `StepTrace`.

    It runs on fake tensors and a copy of the network, under the modes of the caller, such as autocast. Users' hooks are
    left out, because they may count or log; those of PyTorch, such as spectral norms, are copied.

    Raises whatever the network raises on fake tensors, e.g. because it asks for their values; and RuntimeError if it
    communicates with other processes, or has an LSTM, which saves other tensors on fake ones.
    """
    if any(isinstance(module, nn.LSTM) for module in network.modules()):
        raise RuntimeError("an LSTM cannot be rehearsed: on fake tensors it saves other tensors")
    while isinstance(network, DistributedDataParallel):
        network = network.module
    is_fake = any(isinstance(one, FakeTensor) for one in [*tensors_in((args, kwargs)), *network.parameters()])
    with on_fakes(network, args, kwargs) as (copied, args, kwargs):
        return traced_step(copied, args, kwargs, None if is_fake else estimates)[0]


@contextmanager
def on_fakes(network: Network, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Network, Any, Any]]:
    """Context with a copy of a network and of its arguments, on fake tensors, where nothing outside changes.

    Tensors of the meta device become fake ones of the CPU.
    """
    given = tensors_in((args, kwargs))
    fakes = [one for one in [*given, *network.parameters()] if isinstance(one, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(one): _faked(mode, one.detach()).requires_grad_(one.requires_grad) for one in given}
    for module in network.modules():
        leaves = tree_leaves(list(vars(module).values()))
        memo |= {id(one): _faked(mode, one) for one in tensors_in(leaves)}
        memo |= {id(one): one.clone_state() for one in leaves if isinstance(one, torch.Generator)}
        packages = ("torch",) if module is network else ("torch", "keepless")  # not our own for this pass
        for hooks in (getattr(module, name) for name in _HOOKS):
            memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if _package(hook) in packages)
    with _one_at_a_time, _as_before(), _quiet(), with_dispatch_modes_off(), mode, _alone():
        yield copy.deepcopy((network, args, kwargs), memo)


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like this one."""
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _package(hook: object) -> str:
    """The package that defines a hook that is an object, or a method of one; functions may do anything."""
    return type(getattr(hook, "__self__", hook)).__module__.partition(".")[0]


@contextmanager
def _as_before() -> Iterator[None]:
    """Context after which all random states are as they were."""
    of_python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which fake tensors do not log the errors that they raise."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _alone() -> Iterator[None]:
    """Context in which nothing is sent to other processes, which may not rehearse now."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    with _NoCommunication():
        yield


class _NoCommunication(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            raise RuntimeError(f"{function} communicates: it cannot be rehearsed in one process")
        return function(*args, **(kwargs or {}))
