"""Trace a step of a network on given arguments: on the network itself, or rehearsed on a copy with fake tensors.

Nothing outside is changed.
"""

import copy
import gc
import logging
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..conversion.activated import hand_over
from ..inputs import Network, tensors_in
from ..saved import is_ordinary
from ..torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    address,
    tree_leaves,
    with_dispatch_modes_off,
    written_arguments,
)
from .counting import Counting
from .step import Step

T = TypeVar("T")

# If threads enter and leave dispatch modes at the same time, PyTorch's flag for them may stay set.
_one_at_a_time = threading.RLock()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LruCache: type[Any] = type(cache(len))


class LeftBehind(RuntimeError):
    """A step reads a fake tensor that code outside the network has kept."""


class _Rehearsal(FakeTensorMode):
    """A fake tensor mode whose tensors raise an error if they are used after it has ended."""

    has_ended = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_ended:
            raise LeftBehind(
                f"{function} reads a fake tensor that code outside the network has cached while a budget was planned: "
                f"cache such tensors in the network, in a functools.lru_cache, or in a dictionary keyed by size, where "
                f"fake tensors are found and removed"
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


def on_fakes(run: Callable[[Network, Any, Any], T], network: Network, args: Any, kwargs: Any) -> T:
    """Call `run` with copies of a network and its arguments, on fake tensors, and return its result.

    Meta tensors become fake CPU tensors. If code outside the network caches fake tensors, they are removed from
    `functools.lru_cache`s, and from dictionaries that hold only tensors, keyed by size or the like. Elsewhere they may
    stay, and raise `LeftBehind` when they are used.

    Raises:
        RuntimeError: the copy uses the network itself, e.g. because its `forward` is a function that refers to it; it
            trains or overwrites tensors outside; it communicates with other processes; or a part is scripted, and so
            shares its parameters with its copies.
        Exception: whatever `run` raises.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise RuntimeError("scripted modules cannot be rehearsed")
    given = tensors_in((args, kwargs))
    fakes = [one for one in [*given, *network.parameters()] if isinstance(one, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else _Rehearsal(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(one): _faked(mode, one.detach()).requires_grad_(one.requires_grad) for one in given}
    for module in network.modules():
        leaves = tree_leaves(list(vars(module).values()))
        memo |= {id(one): _faked(mode, one) for one in tensors_in(leaves)}
        memo |= {id(one): one.clone_state() for one in leaves if isinstance(one, torch.Generator)}
        packages = ("torch",) if module is network else ("torch", "keepless")  # not our hooks for this pass
        for hooks in (getattr(module, name) for name in _HOOKS):
            kept = ((key, one) for key, one in hooks.items() if one is hand_over or _package(one) in packages)
            memo[id(hooks)] = type(hooks)(kept)
    watch = _Watch([*network.parameters(), *network.buffers()], memo.values())
    copied: list[Any] = []
    try:
        with _one_at_a_time, _ctrl_c_waits(), _as_before(), _quiet(), with_dispatch_modes_off(), mode:
            copied += copy.deepcopy((network, args, kwargs), memo)
            with watch:
                return run(*copied)
    finally:
        memo.clear()
        copied.clear()
        if isinstance(mode, _Rehearsal):
            mode.has_ended = True
            watch.forget()


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like this one."""
    if not tensor.is_leaf:  # a parameter set by `torch.func.functional_call`
        tensor = tensor.detach().requires_grad_()
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _package(hook: object) -> str:
    """The package of the object that a hook is, or is a method of; "builtins" for functions, which may do anything."""
    return type(getattr(hook, "__self__", hook)).__module__.partition(".")[0]


class _Watch(TorchDispatchMode):
    """Refuses operations that use tensors outside the copy, and remembers the fake tensors that were made.

    Args:
        own: the parameters and buffers of the network itself.
        given: objects, including fake tensors.
    """

    def __init__(self, own: Iterable[Tensor], given: Iterable[Any]):
        super().__init__()
        self.own = [one.untyped_storage() for one in own if is_ordinary(one)]
        self.addresses = set(map(address, self.own))
        self.made = [weakref.ref(one) for one in given if isinstance(one, FakeTensor)]

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":  # the device of a fake tensor, a very frequent query
            return function(*args, **kwargs)
        if "c10d" in function.namespace:
            raise RuntimeError(f"{function} communicates with other processes: it cannot be rehearsed in one process")
        real = [one for one in tensors_in((args, kwargs)) if not isinstance(one, FakeTensor)]
        if real:
            self._check(function, real, args, kwargs)
        result = function(*args, **kwargs)
        self.made += [weakref.ref(one) for one in tensors_in(result) if isinstance(one, FakeTensor)]
        return result

    def _check(self, function: OpOverload, real: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(is_ordinary(one) and address(one.untyped_storage()) in self.addresses for one in real):
            raise RuntimeError(f"{function} reads a tensor of the network itself: is a `forward` bound to it?")
        if torch.is_grad_enabled() and any(one.requires_grad for one in real):
            raise RuntimeError(f"{function} reads a trained tensor outside the network")
        written = [args[n] if n < len(args) else kwargs.get(name) for n, name in written_arguments(function)]
        if any(one is other for one in tensors_in(written) for other in real):
            raise RuntimeError(f"{function} writes over a tensor outside the network")

    def forget(self) -> None:
        """Remove fake tensors from caches outside the network that its code may have filled."""
        if not self._left():
            return
        torch.clear_autocast_cache()
        gc.collect()
        left = self._left()
        ids, holders = set(map(id, left)), list(left)
        if frozen := gc.get_freeze_count():
            gc.unfreeze()  # frozen objects are not searched
        for _ in range(3):  # caches may be of collections of tensors
            holders += gc.get_referrers(*(one for one in holders if isinstance(one, (Tensor, tuple, list, dict))))
        if frozen:
            gc.freeze()
        for holder in holders:
            if isinstance(holder, _LruCache):
                _forget_in(holder, ids)
            elif type(holder) is dict and not any(isinstance(key, str) for key in holder) and _holds_tensors(holder):
                for key in [key for key, value in holder.items() if _holds(value, ids)]:
                    del holder[key]

    def _left(self) -> list[Tensor]:
        return [tensor for reference in self.made if (tensor := reference()) is not None]


def _forget_in(cache: Any, ids: set[int]) -> None:
    """Remove only the results with these tensors from a `functools.lru_cache`: others may be a user's state.

    CPython's cache refers to a dictionary of its results, or of links if it has a maximum; it then also refers to the
    key and the result of each link, one after the other. A link that is no longer in the dictionary is passed over.
    """
    parts = gc.get_referents(cache)
    results = next((one for one in parts if type(one) is dict and one is not vars(cache)), {})
    keys = [key for key, value in results.items() if _holds(value, ids)]
    keys += [key for key, value in pairwise(parts) if _holds(value, ids)]
    for key in keys:
        results.pop(key, None)


def _holds(value: object, ids: set[int]) -> bool:
    """Whether a value is one of these tensors, or a collection with one."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else (value,)
    return any(id(part) in ids for part in parts)


def _holds_tensors(values: dict[Any, Any]) -> bool:
    """Whether all values of a dictionary are tensors or tuples of tensors."""
    parts = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    return all(isinstance(part, Tensor) for part in parts)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Context that delays Ctrl-C to its end: in the middle of a dispatch mode it may end the process."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[object] = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _as_before() -> Iterator[None]:
    """Context that restores all random states."""
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
    """Context in which errors of fake tensors are not logged, nor printed by anomaly mode."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        log.setLevel(before)


class Loss(torch.autograd.Function):
    """A loss of 0 bytes, which gives each of its input tensors a gradient that exists until it has been read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(one.shape, one.stride(), one.dtype, one.device) for one in tensors]
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # one for each tensor
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in ctx.forms
        )


def differentiable(outputs: object) -> list[Tensor]:
    """The outputs of a network where a backward pass starts. ValueError: no output needs a gradient."""
    found = [one for one in tensors_in(outputs) if one.requires_grad and one.is_floating_point()]
    if not found:
        raise ValueError("no output of the network needs a gradient: train some of it, outside torch.no_grad()")
    return backward_starts(found)


def counted_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], measures: bool = False) -> Step:
    """A step of a network, real or on fake tensors. `measures`: see `Counting`; always on for real tensors.

    The mean squares of the outputs are its losses; if operators are not measured, as by planners that count the loss
    themselves, a `Loss`.

    Gradients, buffers and the random state are restored. On real tensors the step takes more memory than usual.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers() if not _is_expanded(buffer)]
    registered = [(module, dict(module._buffers)) for module in network.modules()]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    counting = Counting(inputs, measures or not is_fake)
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with nullcontext() if is_fake else _as_before():
            outputs = counting.forward_pass(network, args, kwargs)
            with counting.made:
                counting.forward_ends(tensors_in(outputs))
                starts = differentiable(outputs)
                losses = [one.square().mean() for one in starts] if counting.measures else [Loss.apply(*starts)]
                torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
                del outputs, starts, losses
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, of_module in registered:  # the network may have assigned new buffers
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return counting.step()


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one is a loss (a scalar), the outputs it is computed from are left out.

    Hugging Face's networks return the loss together with the logits.
    """
    pending: list[Any] = [output.grad_fn for output in outputs if output.dim() == 0 and output.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = [node for node, _ in pending.pop().next_functions if node is not None and node not in seen]
        seen.update(following)
        pending += following
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether entries share memory, as in expanded tensors, which cannot be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rehearsed_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The calls and memory of a network's step with these arguments.

    It runs on fake tensors and a copy of the network, under the modes of the caller, such as autocast. Users' hooks are
    left out, because they may count or log; hooks of PyTorch (e.g. spectral norms) and of `to_inplace` are copied.

    Raises what `on_fakes` raises, including errors of networks that ask for values of fake tensors.
    """
    while isinstance(network, DistributedDataParallel):
        network = network.module
    tensors = [*tensors_in((args, kwargs)), *network.parameters()]
    without_values = any(isinstance(one, FakeTensor) or one.is_meta for one in tensors)
    return on_fakes(partial(counted_step, measures=not without_values), network, args, kwargs)
