"""Run a network on fake tensors: a copy of it, with nothing outside changed."""

import copy
import gc
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..inputs import Network, tensors_in
from ..torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    tree_leaves,
    with_dispatch_modes_off,
    written_arguments,
)

T = TypeVar("T")

# Threads that enter and leave dispatch modes at the same time leave PyTorch's flag of them behind.
_one_at_a_time = threading.RLock()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LruCache: type[Any] = type(cache(len))


class LeftBehind(RuntimeError):
    """Objects outside the network hold fake tensors of a step, which real steps would read."""


def on_fakes(run: Callable[[Network, Any, Any], T], network: Network, args: Any, kwargs: Any) -> T:
    """Call `run` with a copy of a network and of its arguments, on fake tensors, and return its result.

    Tensors of the meta device become fake ones of the CPU. Fake tensors that the network's code has put into
    dictionaries and `functools.lru_cache`s outside of the network are removed from there.

    Raises:
        RuntimeError: the copy uses the network itself, e.g. because its `forward` is a function that refers to it; or
            tensors outside that are trained or written over; or it communicates with other processes.
        LeftBehind: fake tensors stay elsewhere outside of the network.
        Exception: whatever `run` raises.
    """
    given = tensors_in((args, kwargs))
    fakes = [one for one in [*given, *network.parameters()] if isinstance(one, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch([*network.parameters(), *network.buffers()])
    memo: dict[int, Any] = {id(one): _faked(mode, one.detach()).requires_grad_(one.requires_grad) for one in given}
    for module in network.modules():
        leaves = tree_leaves(list(vars(module).values()))
        memo |= {id(one): _faked(mode, one) for one in tensors_in(leaves)}
        memo |= {id(one): one.clone_state() for one in leaves if isinstance(one, torch.Generator)}
        packages = ("torch",) if module is network else ("torch", "keepless")  # not our own for this pass
        for hooks in (getattr(module, name) for name in _HOOKS):
            memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if _package(hook) in packages)
    has_ended = False
    try:
        with _one_at_a_time, _as_before(), _quiet(), with_dispatch_modes_off(), mode, watch:
            result = run(*copy.deepcopy((network, args, kwargs), memo))
        has_ended = True
        return result
    finally:
        memo.clear()
        if not fakes:  # the caller's own mode
            watch.forget(by_error=not has_ended)


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like this one."""
    if not tensor.is_leaf:  # a parameter that `torch.func.functional_call` has put there
        tensor = tensor.detach().requires_grad_()
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _package(hook: object) -> str:
    """The package that defines a hook that is an object, or a method of one; functions may do anything."""
    return type(getattr(hook, "__self__", hook)).__module__.partition(".")[0]


class _Watch(TorchDispatchMode):
    """Refuses operations that reach out of the copy, and knows the fake tensors that operations have made.

    Args:
        own: the parameters and buffers of the network itself.
    """

    def __init__(self, own: Iterable[Tensor]):
        super().__init__()
        self.own = set(map(id, own))
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in function.namespace:
            raise RuntimeError(f"{function} communicates: it cannot be rehearsed in one process")
        real = [one for one in tensors_in((args, kwargs)) if not isinstance(one, FakeTensor)]
        if real:
            self._check(function, real, args, kwargs)
        result = function(*args, **kwargs)
        self.made += [weakref.ref(one) for one in tensors_in(result) if isinstance(one, FakeTensor)]
        return result

    def _check(self, function: OpOverload, real: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.own.isdisjoint(map(id, real)):
            raise RuntimeError(f"{function} reads a tensor of the network itself: is a `forward` bound to it?")
        if any(one.requires_grad for one in real):
            raise RuntimeError(f"{function} reads a trained tensor outside the network")
        written = [args[n] if n < len(args) else kwargs.get(name) for n, name in written_arguments(function)]
        if any(one is other for one in tensors_in(written) for other in real):
            raise RuntimeError(f"{function} writes over a tensor outside the network")

    def forget(self, by_error: bool) -> None:
        """Remove fake tensors from where code outside the network has put them.

        LeftBehind: it is not known how. Not raised `by_error`, which itself holds some.
        """
        if self._left():
            torch.clear_autocast_cache()
            gc.collect()
        if self._left():
            with _thawed():
                self._clean(by_error)

    def _clean(self, by_error: bool) -> None:
        left = self._left()
        for tensor in left:
            _remove_from_caches(tensor, {id(left)})
        del left, tensor
        gc.collect()
        if (left := self._left()) and not by_error:
            holders = sorted({_name(one) for tensor in left for one in gc.get_referrers(tensor) if one is not left})
            raise LeftBehind(
                f"a budget is planned on fake tensors, and {len(left)} of them are now held outside the network (by "
                f"{', '.join(holders) or 'a graph'}), where real steps would read them: hold such tensors in the "
                f"network, in a dictionary, or in a functools.lru_cache, from where they can be removed"
            )

    def _left(self) -> list[Tensor]:
        return [tensor for reference in self.made if (tensor := reference()) is not None]


def _remove_from_caches(held: object, ours: set[int]) -> None:
    """Remove an object from the caches that hold it, directly or in tuples and lists. `ours`: other lists, by id."""
    holders = gc.get_referrers(held)
    ours = {*ours, id(holders)}
    for holder in holders:
        if id(holder) in ours:
            continue
        if isinstance(holder, _LruCache):
            holder.cache_clear()
        elif isinstance(holder, (tuple, list)):
            _remove_from_caches(holder, ours)
        elif isinstance(holder, dict) and not _is_namespace(holder):
            for key in [key for key, value in holder.items() if value is held]:
                del holder[key]


@contextmanager
def _thawed() -> Iterator[None]:
    """Context in which the garbage collector sees all objects, also those that it was told to leave alone."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _is_namespace(names: dict[Any, Any]) -> bool:
    """Whether a dictionary has the variables of a module or the attributes of an object."""
    return any(getattr(one, "__dict__", None) is names for one in gc.get_referrers(names))


def _name(holder: object) -> str:
    if isinstance(holder, dict):
        owners = [one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder]
        holder = owners[0] if owners else holder
    return holder.__name__ if isinstance(holder, (ModuleType, type)) else f"a {type(holder).__name__}"


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
    """Context in which fake tensors do not log the errors that they raise, and anomaly mode does not print them."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        log.setLevel(before)
