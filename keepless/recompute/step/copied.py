"""Run a copy of a network, on fake tensors or real ones, without changing anything outside the copy."""

import copy
import gc
import logging
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...inputs import Network, tensors_in
from ...saved import is_ordinary
from ...torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    address,
    communicated_alone,
    dispatch_modes,
    forget_originals,
    is_any_autocast_enabled,
    quick_fake,
    with_dispatch_modes_off,
    without_global_state,
    written_arguments,
)
from .closures import add_to, fill
from .outside import LruCache, put_back
from .sharded import has_distributed_tensors, without_fsdp2

T = TypeVar("T")

# If threads enter and leave dispatch modes at the same time, PyTorch's flag for them may stay set.
_one_at_a_time = threading.RLock()
_KEPT = (
    "code outside the network has kept while a budget was planned: keep tensors in the network, or in what its "
    "functions name"
)
_FRESH = torch.ops.aten.lift_fresh.default


class LeftBehind(RuntimeError):
    """Code outside the network keeps a fake tensor, where it is not found, or reads one."""


class Overwritten(RuntimeError):
    """A forward pass writes over a parameter, whose memory the copy shares."""


class _Alone(nn.Module):
    """A `DistributedDataParallel` that does not communicate."""

    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Rehearsal(FakeTensorMode):
    """A fake tensor mode whose tensors raise an error if they are used after it has ended."""

    has_ended = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_ended:
            raise LeftBehind(f"{function} reads a fake tensor, which {_KEPT}")
        found = quick_fake(self, function, args, kwargs or {})
        return super().__torch_dispatch__(function, types, args, kwargs) if found is NotImplemented else found


def on_copy(
    run: Callable[[Network, Any, Any], T],
    network: Network,
    args: Any,
    kwargs: Any,
    *,
    is_fake: bool = True,
    shares: bool = False,
) -> T:
    """Call `run` with copies of a network and its arguments, and return its result.

    With fake tensors, meta tensors become fake CPU tensors. Python state outside the copy ends as it was before: see
    `put_back`.

    The copy does not communicate with other processes: what they would send is taken to equal its own tensors.
    `shares`: with real tensors, let the copy's parameters use the memory of the network's.

    Raises:
        Overwritten: `shares`, and an operator would write over a parameter. Nothing was written.
        LeftBehind: fake tensors stay elsewhere. They raise it, too, when they are read.
        RuntimeError: the copy uses the network itself, e.g. because a function that it calls refers to it; it trains or
            overwrites tensors outside; a part is scripted, and so shares its parameters with its copies; it is tensor
            parallel; FSDP1 has sharded it, or FSDP2 has, and tensors are real.
        Exception: whatever `run` raises.
    """
    _check_can_be_copied(network)
    given = tensors_in((args, kwargs))
    fakes = [one for one in [*given, *network.parameters()] if isinstance(one, FakeTensor)]
    mode: Any = nullcontext()
    if is_fake:
        mode = fakes[0].fake_mode if fakes else _Rehearsal(allow_non_fake_inputs=True)
    watch = _Watch([*network.parameters(), *network.buffers()], is_fake)
    like = partial(_faked, mode) if is_fake else partial(_alike, shared=watch.shared if shares else None)
    memo: dict[int, Any] = {id(one): like(one.detach()).requires_grad_(one.requires_grad) for one in given}
    sharded = without_fsdp2(network, mode, memo)
    if sharded and not is_fake:
        raise RuntimeError("a network that FSDP2 has sharded must run on fake tensors")
    parallel = [one for one in network.modules() if isinstance(one, DistributedDataParallel)]
    memo |= {id(one): object.__new__(_Alone) for one in parallel}
    functions = add_to(memo, network, args, kwargs, like)
    for one in network.parameters():
        if one.is_leaf and one.grad_dtype != one.dtype:
            memo[id(one)].grad_dtype = one.grad_dtype
    copied: list[Any] = []
    kept: list[str] = []
    reached: set[int] = set()
    try:
        with _one_at_a_time, _ctrl_c_waits(), _as_before(is_fake), _quiet(), with_dispatch_modes_off(), mode:
            _fill_modules(sharded, parallel, memo)
            copied += copy.deepcopy((network, args, kwargs), memo)
            fill(functions, memo)
            watch.note([one for one in memo.values() if isinstance(one, Tensor)])
            with put_back(copied, set(map(id, memo.values()))) as reached, watch:
                result = copy_context().run(run, *copied)
    finally:
        memo.clear()
        sharded.clear()
        copied.clear()
        watch.restore()
        if isinstance(mode, _Rehearsal):
            mode.has_ended = True
            forget_originals(mode)  # programs cannot swap parameters that have weak references
            kept = watch.forget(reached)
    if kept:
        raise LeftBehind(f"{kept[0]} holds a fake tensor, which {_KEPT}")
    return result


def _check_can_be_copied(network: nn.Module) -> None:
    """RuntimeError if a network is scripted in part or tensor parallel, or FSDP1 has sharded it."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise RuntimeError("scripted modules cannot be rehearsed")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in network.modules()):
        raise RuntimeError("FSDP1 frees the memory of tensors that a copy would read; use fully_shard (FSDP2) instead")
    if has_distributed_tensors(network):
        raise RuntimeError("tensor parallel networks, with DTensor parameters, cannot be rehearsed: give no budget")


def _fill_modules(
    sharded: list[tuple[nn.Module, nn.Module]], parallel: list[DistributedDataParallel], memo: dict[int, Any]
) -> None:
    """Copy the contents of sharded and parallel modules into the empty objects that stand for them."""
    for module, empty in sharded:
        own = {name: one for name, one in vars(module).items() if "composable" not in str(name)}
        vars(empty).update(copy.deepcopy(own, memo))  # without FSDP2's state
    for module in parallel:
        own = {name: vars(module)[name] for name in vars(nn.Module())}
        vars(memo[id(module)]).update(copy.deepcopy(own, memo))


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like this one; without its gradient if that has another dtype, which PyTorch refuses to copy."""
    if not tensor.is_leaf:  # a parameter set by `torch.func.functional_call`
        tensor = tensor.detach().requires_grad_()
    if tensor.is_meta:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    elif tensor.grad is None or tensor.grad.dtype == tensor.dtype:
        return mode.from_tensor(tensor)
    else:
        fake = mode.from_tensor(tensor.detach())
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _alike(tensor: Tensor, shared: set[int] | None = None) -> Tensor:
    """A tensor like this one, in memory of its own.

    A parameter's memory is shared instead, if there is a set for the address of the copy's storage. This is another
    storage for the same memory, so that a `_Watch` can tell the copy from the parameter.
    """
    other = tensor.detach()
    if shared is None or not isinstance(tensor, nn.Parameter) or not is_ordinary(tensor):
        other = other.clone()
    else:
        whole = other.as_strided((other.untyped_storage().nbytes() // other.itemsize,), (1,), 0)
        whole = torch.from_dlpack(whole)
        other = whole.as_strided(other.shape, other.stride(), other.storage_offset()).detach()
        shared.add(address(whole.untyped_storage()))
    other.requires_grad_(tensor.requires_grad)
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


class _Watch(TorchDispatchMode):
    """Refuses operations that read the network's own tensors, or train or overwrite others outside the copy.

    It also remembers the fake tensors that were made.

    Args:
        own: the parameters and buffers of the network itself.
    """

    def __init__(self, own: Iterable[Tensor], is_fake: bool):
        super().__init__()
        self.own = [one.untyped_storage() for one in own if is_ordinary(one)]
        self.addresses = set(map(address, self.own))
        self.made: list[weakref.ref[Tensor]] = []  # fake tensors
        self.inside: set[int] = set()  # addresses of real tensors' memory
        self.shared: set[int] = set()  # of these, the ones of parameters that share the network's memory
        self.is_fake = is_fake
        self.generators: dict[torch.Generator, Tensor] = {}  # outside, and their states before

    def note(self, tensors: Iterable[Tensor], outside: Iterable[Tensor] = ()) -> None:
        """Note that these tensors belong to the copy, unless they share memory with one of those `outside`."""
        if self.is_fake:
            self.made += [weakref.ref(one) for one in tensors if isinstance(one, FakeTensor)]
        else:
            others = {address(one.untyped_storage()) for one in outside}
            self.inside |= {address(one.untyped_storage()) for one in tensors if is_ordinary(one)} - others

    def _is_outside(self, tensor: Tensor) -> bool:
        if self.is_fake:
            return not isinstance(tensor, FakeTensor)
        return is_ordinary(tensor) and address(tensor.untyped_storage()) not in self.inside

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":  # the device of a fake tensor, a very frequent query
            return function(*args, **kwargs)
        if "c10d" in function.namespace:
            return communicated_alone(function, args)
        if function is _FRESH:  # e.g. from `torch.tensor`
            self.note(args)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Generator) and one not in self.generators:
                self.generators[one] = one.get_state()
        outside = [one for one in tensors_in((args, kwargs)) if self._is_outside(one)]
        if outside:
            self._check(function, outside, args, kwargs)
        if self.shared and any(
            is_ordinary(one) and address(one.untyped_storage()) in self.shared
            for one in _written(function, args, kwargs)
        ):
            raise Overwritten(f"{function} writes over a parameter")
        result = function(*args, **kwargs)
        self.note(tensors_in(result), outside)
        return result

    def _check(
        self, function: OpOverload, outside: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(is_ordinary(one) and address(one.untyped_storage()) in self.addresses for one in outside):
            raise RuntimeError(f"{function} reads a tensor of the network itself: is a `forward` bound to it?")
        if torch.is_grad_enabled() and any(one.requires_grad for one in outside):
            raise RuntimeError(f"{function} reads a trained tensor outside the network")
        if any(one is other for one in _written(function, args, kwargs) for other in outside):
            raise RuntimeError(f"{function} writes over a tensor outside the network")

    def restore(self) -> None:
        """Undo what random generators outside the copy have drawn."""
        for generator, state in self.generators.items():
            generator.set_state(state)

    def forget(self, reached: set[int]) -> list[str]:
        """Remove fake tensors from lists, dictionaries and caches, and return in words what held them, caches apart.

        `reached`: ids of what was put back. Of these, caches hold fake tensors only in entries that are not found.
        """
        if not self._left():
            return []
        gc.collect()
        frozen = gc.get_freeze_count()
        if frozen:
            gc.unfreeze()  # frozen objects are not searched
        left = self._left()  # autocast may hold fake weights until it ends, where nothing finds them
        holders = [one for one in gc.get_referrers(*left) if one is not left]
        if frozen:
            gc.freeze()
        for one in holders:
            if isinstance(one, LruCache) and id(one) not in reached:
                one.cache_clear()
        ids = set(map(id, left))
        return [_taken_out_of(one, ids) for one in holders if not isinstance(one, (FrameType, LruCache))]

    def _left(self) -> list[Tensor]:
        return [tensor for reference in self.made if (tensor := reference()) is not None]


def _written(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes over."""
    return tensors_in([args[n] if n < len(args) else kwargs.get(name) for n, name in written_arguments(function)])


def _taken_out_of(holder: Any, ids: set[int]) -> str:
    """Remove these tensors from a list or a dictionary. Returns in words what holds them."""
    name = f"a {type(holder).__name__}"
    if type(holder) is list:
        holder[:] = [one for one in holder if id(one) not in ids]
    elif type(holder) is dict:
        for key in [key for key, one in holder.items() if id(one) in ids]:
            name = f"{key!r} of a dict"
            del holder[key]
    return name


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
def _as_before(is_fake: bool) -> Iterator[None]:
    """Context that restores all random states, and leaves the program's weights in autocast's cache.

    If the cache were cleared and a weight cast again, its gradients would be rounded differently. Real weights of the
    copy are not cached: the cache would hold them until the program leaves autocast.
    """
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(caches and (is_fake or not is_any_autocast_enabled()))
    of_python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def _quiet() -> Iterator[None]:
    """`without_global_state`, in which fake tensors log no errors of this thread, and anomaly mode prints none.

    PyTorch has one anomaly mode for all threads.
    """
    log, thread = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def of_others(_: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    log.addFilter(of_others)
    try:
        # The hooks of this thread, and of one that runs its backward pass, are those under its `_Watch`.
        with (
            torch.autograd.set_detect_anomaly(False),
            without_global_state(lambda: any(isinstance(one, _Watch) for one in dispatch_modes())),
        ):
            yield
    finally:
        log.removeFilter(of_others)
