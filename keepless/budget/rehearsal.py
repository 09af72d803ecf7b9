"""Rehearse a training step: on fake tensors and a copy of the network, so that nothing changes or is computed."""

import copy
import logging
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..inputs import Network, tensors_in
from ..torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves, with_dispatch_modes_off
from .estimates import Estimates
from .step import Step
from .traced_step import traced_step

# Threads that enter and leave dispatch modes at the same time leave PyTorch's flag of them behind.
_one_at_a_time = threading.RLock()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
