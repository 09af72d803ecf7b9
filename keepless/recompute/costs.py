"""Costs of operators: time and temporary memory."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..inputs import tensors_in
from ..saved import is_ordinary
from ..torch_internals import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
    without_function_modes,
)
from .values import autocast_as, autocast_of

_profiler = threading.Lock()  # PyTorch has one profiler per process; two threads that start it crash
_BEGINS = "keepless: the step begins"  # an event of the profiler
_PRODUCTS = frozenset("matmul __matmul__ mm bmm addmm baddbmm".split())


class TensorSpec(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def size(self) -> int:
        """Bytes of its memory, from its first value to its last."""
        return self.dtype.itemsize * self.span

    @property
    def span(self) -> int:
        """Entries in memory, from the first one to the last; 0 if the tensor is empty."""
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)]
        return 1 + sum(steps) if all(self.shape) else 0

    def tensor(self) -> Tensor:
        """A tensor of ones, so that gradients are finite; of zeros if it holds integers, which may be indices."""
        value = 1 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        whole = torch.full((self.span,), value, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride).requires_grad_(self.requires_grad)


class MeasuredCall(NamedTuple):
    """A call without the values of its tensors, to be measured on others."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]  # `TensorSpec`s and constants
    names: tuple[str, ...]  # names of the last arguments, which are passed by keyword
    autocast: tuple[bool, torch.dtype | None]  # see `autocast_of`

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(one.size for one in tree_leaves(self.arguments, is_leaf=_is_spec) if _is_spec(one))

    @property
    def trained(self) -> int:
        """Bytes of the arguments that need gradients."""
        specs = filter(_is_spec, tree_leaves(self.arguments, is_leaf=_is_spec))
        return sum(one.size for one in specs if one.requires_grad)

    @property
    def device(self) -> torch.device:
        return computing_device(filter(_is_spec, tree_leaves(self.arguments, is_leaf=_is_spec)))

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """The result, and the arguments that need gradients."""
        given = self.made_arguments()
        result = self.with_arguments(given)
        if not isinstance(result, Tensor):
            result = next(one for one in tensors_in(result) if one.requires_grad)
        return result, [one for one in tensors_in(given) if one.requires_grad]

    def made_arguments(self) -> list[Any]:
        return [tree_map(_made, one, is_leaf=_is_spec) for one in self.arguments]

    def with_arguments(self, given: Sequence[Any]) -> Tensor:
        unnamed = len(given) - len(self.names)
        with autocast_as(self.autocast, self.device.type):
            return self.function(*given[:unnamed], **dict(zip(self.names, given[unnamed:], strict=True)))


def computing_device(tensors: "Iterable[Tensor | TensorSpec]") -> torch.device:
    """The first device of real tensors that is not the CPU; the CPU if there is none."""
    devices = (one.device for one in tensors if not isinstance(one, FakeTensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _is_spec(one: object) -> bool:
    return isinstance(one, TensorSpec)


def _made(one: object) -> object:
    return one.tensor() if isinstance(one, TensorSpec) else one


def _spec(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    return TensorSpec(tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad)


def call_of(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], lists: bool
) -> MeasuredCall | None:
    """A call that can be repeated; None if it takes tensors that are not ordinary or, without `lists`, in lists."""
    arguments: list[Any] = []
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Generator):  # measuring would advance it
            return None
        if isinstance(one, (list, tuple)):
            one = tuple(one) if isinstance(one, list) else one
            if any(isinstance(item, Tensor) for item in one) and not lists:
                return None
        if not all(map(is_ordinary, tensors_in(one))):
            return None
        arguments.append(tree_map(_spec, one))
    call = MeasuredCall(function, tuple(arguments), tuple(kwargs), (False, None))
    return call._replace(autocast=autocast_of(call.device.type))


def peak_bytes(
    step: Callable[[], object], device: torch.device | str, first: Callable[[], object] | None = None
) -> int:
    """Peak bytes of tensors during a step, beyond those allocated before it.

    `device`: the tensors' device; "cuda" is the current one, and resets the peak statistics of PyTorch's allocator.
    `first` runs before the step. On the CPU, it does not count if memory older than `first` is freed.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if first is not None:
            first()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler sees every allocation on the CPU, even in compiled code. Its log is hidden.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        if first is not None:
            first()
            with torch.profiler.record_function(_BEGINS):
                pass
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() in ("[memory]", _BEGINS)]
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held = 0 if event.name() == _BEGINS else held + event.nbytes()
        peak = held if event.name() == _BEGINS else max(peak, held)
    return peak


def _on_ones(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Measure once, outside all modes; None if the call fails on ones, such as a Cholesky decomposition.

    After torch.OutOfMemoryError it is None too, but is measured again next time.
    """
    known: dict[Any, Any] = {}

    def measured(*call: Any) -> Any:
        if call not in known:
            try:
                with without_dispatch_modes(), without_function_modes():
                    known[call] = measure(*call)
            except torch.OutOfMemoryError:
                return None
            except RuntimeError:
                known[call] = None
        return known[call]

    return measured


@_on_ones
def forward_temporaries(call: MeasuredCall) -> int:
    """Temporary bytes of a call, besides its arguments and results, measured on other tensors."""
    with _measured(call.device):
        kept: list[object] = []
        call.run()
        given = call.made_arguments()
        peak = peak_bytes(lambda: kept.append(call.with_arguments(given)), call.device)
        return max(0, peak - sum(one.nbytes for one in tensors_in(kept)))


@_on_ones
def forward_seconds(call: MeasuredCall) -> float:
    """Seconds of a call, measured on other tensors, and only once, so that plans for several budgets agree."""
    with torch.random.fork_rng([call.device] if call.device.type == "cuda" else []):
        given = call.made_arguments()
        return seconds_again(lambda: call.with_arguments(given), call.device)


@_on_ones
def backward_temporaries(call: MeasuredCall, stride: tuple[int, ...], of_many: bool) -> int:
    """Temporary bytes of a call's backward node, besides saved tensors and gradients.

    `stride`: of the result's gradient. `of_many`: the call makes several nodes, each of which frees its saved tensors.
    """
    made: list[Any] = []

    def run() -> None:
        result, leaves = call.run()
        made[:] = result, leaves, TensorSpec(tuple(result.shape), stride, result.dtype, result.device, False).tensor()

    def differentiate() -> None:
        result, leaves, gradient = made
        if of_many:
            made.clear()
        made.append(torch.autograd.grad(result, leaves, gradient, retain_graph=not of_many))

    with _measured(call.device):
        if call.device.type == "cuda":  # first cuDNN's algorithm search and cuBLAS's workspace, which do not count
            run()
            differentiate()
            made.clear()
        if of_many:
            peak = peak_bytes(differentiate, call.device, first=run)
        else:  # keep the graph: the profiler warns if memory is freed that was allocated before it started
            run()
            peak = peak_bytes(differentiate, call.device)
        return max(0, peak - call.trained)


@contextmanager
def _measured(device: torch.device) -> Iterator[None]:
    """Context for measuring outside recordings, one thread at a time. Keeps the random state and autocast's cache.

    Hooks hold tensors without their graphs: a graph that held its own output through a hook would never be freed.
    """
    devices, caches = [device] if device.type == "cuda" else [], torch.is_autocast_cache_enabled()
    with _profiler, torch.random.fork_rng(devices), torch.enable_grad(), saved_tensors_hooks(Tensor.detach, _as_it_is):
        torch.set_autocast_cache_enabled(False)  # it would hold casts of the other tensors
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of a call, and its seconds; on CUDA without the time to launch a kernel and wait for it."""
    if device.type != "cuda":
        began = time.perf_counter()
        result = call()
        return result, time.perf_counter() - began
    result, seconds = _synchronised(call, device)
    return result, max(0.0, seconds - _launch_seconds(device))


def seconds_again(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of three calls in seconds, after one that warms up memory, caches and the choice of algorithms."""
    call()
    return min(seconds_of(call, device)[1] for _ in range(3))


def _synchronised(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


@cache
def _launch_seconds(device: torch.device) -> float:
    """Seconds to launch one kernel and wait for it, an overhead that consecutive kernels do not have."""
    with without_function_modes():
        one = torch.zeros((), device=device)
        return min(_synchronised(one.zero_, device)[1] for _ in range(10))


def operations_of(function: Callable[..., Any], arguments: Sequence[Any], result: Tensor) -> int:
    """Multiplications and additions of a matrix product, a convolution or attention; 0 for other calls."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):  # custom operators, whose names say nothing
        return 0
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    name, length = getattr(function, "__name__", ""), 0  # number of products in each value of the result
    if "conv_transpose" in name:  # counted for each value of the input instead
        return 2 * tensors[0].numel() * tensors[1].numel() // tensors[1].shape[0]
    if name == "scaled_dot_product_attention":
        length = tensors[1].shape[-2] * (1 + tensors[0].shape[-1] // result.shape[-1])
    elif "conv" in name or name == "linear":
        length = tensors[1].numel() // tensors[1].shape[0]
    elif name in _PRODUCTS:
        length = tensors[-2].shape[-1]
    elif name == "einsum":
        length = _summed(arguments[0], tensors_in(arguments))
    return 2 * length * result.numel()


def _summed(equation: str, tensors: Sequence[Tensor]) -> int:
    """The number of products that einsum adds up for each value of its result."""
    sizes: dict[str, int] = {}
    terms, _, output = equation.replace(" ", "").partition("->")
    for term, tensor in zip(terms.split(","), tensors, strict=True):
        head, _, tail = term.partition("...")
        sizes |= zip(head, tensor.shape, strict=False)
        sizes |= zip(reversed(tail), reversed(tensor.shape), strict=False)
    kept = output or [letter for letter in sizes if terms.count(letter) == 1]
    return math.prod(size for letter, size in sizes.items() if letter not in kept)


def estimated_seconds(function: Callable[..., Any], arguments: Sequence[Any], result: Tensor) -> float:
    """Seconds estimated from bytes and operations, for fake tensors; good enough to tell which call takes longer."""
    moved = result.nbytes + sum(one.nbytes for one in arguments if isinstance(one, Tensor))
    return seconds_for(moved, operations_of(function, arguments, result), result)


_stands_for: ContextVar[torch.device | None] = ContextVar("stands_for", default=None)


@contextmanager
def times_of(device: str) -> Iterator[None]:
    """Context in which calls on fake tensors are timed as on this device, not their own; "meta": a typical GPU."""
    before = _stands_for.set(torch.device(device))
    try:
        yield
    finally:
        _stands_for.reset(before)


def seconds_for(moved: int, operations: int, result: Tensor) -> float:
    """Seconds for this many bytes and operations, on the device of a result."""
    rates = _rates(_stands_for.get() or result.device, result.dtype)
    return moved / rates.bytes + operations / rates.operations


class _Rates(NamedTuple):
    """Rates of a device, per second."""

    bytes: float  # read or written
    operations: float  # multiplications and additions of a matrix product


@cache
def _rates(device: torch.device, dtype: torch.dtype) -> _Rates:
    """Rates measured by a copy and a matrix product; typical of recent GPUs if the device is not available."""
    is_cuda = device.type == "cuda"
    if not (is_cuda and torch.cuda.is_available() or device.type == "cpu"):
        return _Rates(1e12, 1e14 if dtype.itemsize <= 2 else 2e13)
    size, width = (2**26, 2**12) if is_cuda else (2**23, 2**8)
    dtype = dtype if dtype.is_floating_point else torch.float32
    with without_dispatch_modes(), without_function_modes(), torch.no_grad():
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target, square = torch.empty_like(source), torch.zeros(width, width, dtype=dtype, device=device)
        copying = seconds_again(lambda: target.copy_(source), device)
        multiplying = seconds_again(lambda: square @ square, device)
    return _Rates(2 * size / max(copying, 1e-9), 2 * width**3 / max(multiplying, 1e-9))
