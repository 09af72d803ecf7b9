"""Costs of operators: time and temporary memory, measured on other tensors or estimated."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...inputs import tensors_in
from ...saved import TensorSpec, is_ordinary
from ...torch_internals import (
    FakeTensor,
    OpOverload,
    tree_leaves,
    tree_map,
    without_collection,
    without_dispatch_modes,
    without_function_modes,
)

_profiler = threading.Lock()  # PyTorch has one profiler per process; two threads that start it crash
_SHORT = 2e-4  # seconds: a shorter operator is timed more often, as it is more easily disturbed
_AGAIN = 3  # so many times more
# PyTorch counts the operations only of CUDA's flash attention; the CPU's operators begin with the same arguments.
_FLASH = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {f"{_FLASH}_for_cpu{end}": getattr(torch.ops.aten, _FLASH + end) for end in ("", "_backward")}


def is_measuring() -> bool:
    """Whether a thread is measuring operators, by PyTorch's profiler."""
    return _profiler.locked()


class Operator(NamedTuple):
    """A call of one of PyTorch's operators, without the values of its tensors: it is measured on ones."""

    function: OpOverload
    arguments: tuple[Any, ...]  # `TensorSpec`s, tuples of these, and constants
    names: tuple[str, ...]  # names of the last arguments, which are passed by keyword

    @property
    def device(self) -> torch.device:
        return computing_device(leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, TensorSpec))

    def call_on_ones(self) -> Callable[[], Any]:
        """A function that makes the call on tensors of ones, allocated here."""
        arguments = tree_map(lambda leaf: leaf.ones() if isinstance(leaf, TensorSpec) else leaf, [*self.arguments])
        if self.function is torch.ops.aten.linalg_matrix_exp.default:  # it takes more memory for larger norms
            arguments[0].mul_(0.01 / arguments[0].shape[-1])
        args = arguments[: len(arguments) - len(self.names)]
        kwargs = dict(zip(self.names, arguments[len(args) :], strict=True))
        return lambda: self.function(*args, **kwargs)


def operator_of(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Operator | None:
    """A call that can be repeated on ones; None if its tensors are not ordinary, or it is no operator of PyTorch's own.

    A custom operator's kernel may read outside its tensors where ones are no indices, as RoI pooling does.
    """
    if function.namespace != "aten":
        return None
    arguments = []
    for argument in (*args, *kwargs.values()):
        spec = tuple(map(spec_of, argument)) if isinstance(argument, (list, tuple)) else spec_of(argument)
        if spec is NotImplemented or (isinstance(spec, tuple) and NotImplemented in spec):
            return None
        arguments.append(spec)
    return Operator(function, tuple(arguments), tuple(kwargs))


def spec_of(argument: Any) -> Any:
    """A tensor's `TensorSpec`, or a constant. NotImplemented: no ordinary tensor, or a generator (it would advance)."""
    if not isinstance(argument, Tensor):
        return NotImplemented if isinstance(argument, torch.Generator) else argument
    if not is_ordinary(argument):
        return NotImplemented
    return TensorSpec.from_tensor(argument)


def computing_device(tensors: Iterable[Tensor | TensorSpec]) -> torch.device:
    """The first device of real tensors that is not the CPU; the CPU if there is none."""
    devices = (tensor.device for tensor in tensors if not isinstance(tensor, FakeTensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def peak_bytes(step: Callable[[], object], device: torch.device | str) -> int:
    """Peak bytes of tensors during a step, beyond those allocated before it. On CPUs PyTorch's profiler counts them.

    `device`: the tensors' device; "cuda" is the current one, and resets the peak statistics of PyTorch's allocator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        bytes_before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - bytes_before
    return _peak_on_cpu(step)


def _peak_on_cpu(step: Callable[[], object]) -> int:
    """As `peak_bytes`. The profiler sees every allocation on the CPU, even in compiled code. Its log is hidden."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0))


class Cost(NamedTuple):
    """The measured cost of an operator; zeros if it fails on ones."""

    seconds: float = 0.0
    temporaries: int = 0  # bytes besides arguments and results


# The results (`TensorSpec`s, and constants) and seconds of an operator's first call, which warms up caches of kernels.
_first_runs: dict[Operator, tuple[Any, float]] = {}
_costs: dict[Operator, Cost] = {}


def cost_of(operator: Operator) -> Cost | None:
    """The measured cost; None if it was not measured, e.g. for lack of memory."""
    return _costs.get(operator)


def results_of(operator: Operator) -> Any:
    """The operator's results on real tensors, as `TensorSpec`s; fake ones may have others.

    Runs it once on ones if it has not run; None if it fails, or if memory is short (then the next call tries again).
    """
    if operator not in _first_runs and operator not in _costs:
        with _measuring({operator.device}):
            _warm_up(operator)
    return _first_runs[operator][0] if operator in _first_runs else None


def _warm_up(operator: Operator) -> None:
    """Note an operator's first run, on ones. One that fails costs nothing; without memory, nothing is noted."""
    try:
        result, seconds = seconds_of(operator.call_on_ones(), operator.device)
        _first_runs[operator] = tree_map(spec_of, result), seconds
    except torch.OutOfMemoryError:
        pass
    except (RuntimeError, IndexError):  # as a Cholesky decomposition of ones
        _costs[operator] = Cost()


def measure(operators: Iterable[Operator]) -> None:
    """Measure operators on ones, outside all modes, each once a process. `cost_of` then tells the costs."""
    new = [operator for operator in dict.fromkeys(operators) if operator not in _costs]
    with _measuring({operator.device for operator in new}):
        for operator in new:
            if operator not in _first_runs:
                _warm_up(operator)
            if operator in _first_runs:
                _costs[operator] = _measured_cost(operator)


def _measured_cost(operator: Operator) -> Cost:
    """The cost of an operator that has run before. Its next call is the one whose memory is watched."""
    call = operator.call_on_ones()
    runs: list[tuple[Any, float]] = []
    peak = peak_bytes(lambda: runs.append(seconds_of(call, operator.device)), operator.device)
    result, seconds = runs.pop()
    result_bytes = sum(tensor.nbytes for tensor in tensors_in(result))
    del result
    for _ in range(_AGAIN if seconds < _SHORT else 0):
        seconds = min(seconds, seconds_of(call, operator.device)[1])
    _, first_seconds = _first_runs[operator]
    return Cost(min(seconds, first_seconds), max(0, peak - result_bytes))


@contextmanager
def _measuring(devices: set[torch.device]) -> Iterator[None]:
    """Context for measuring: outside all modes, one thread at a time. Random states are kept.

    Gradients are enabled, but no tensor needs one: where they are not, LSTMs return no workspace. Python collects no
    garbage, which would take time, and whose memory would count as freed by the operator.
    """
    on_cuda = [device for device in devices if device.type == "cuda"]
    with _profiler, torch.random.fork_rng(on_cuda), without_dispatch_modes(), without_function_modes():
        with torch.enable_grad(), without_collection():
            yield


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of a call, and its seconds; on CUDA without the time to launch a kernel and wait for it."""
    if device.type != "cuda":
        began = time.perf_counter()
        result = call()
        return result, time.perf_counter() - began
    result, seconds = _run_synchronised(call, device)
    return result, max(0.0, seconds - _launch_seconds(device))


def shortest_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of three calls in seconds, after one that warms up memory, caches and the choice of algorithms."""
    call()
    return min(seconds_of(call, device)[1] for _ in range(3))


def _run_synchronised(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


@cache
def _launch_seconds(device: torch.device) -> float:
    """Seconds to launch one kernel and wait for it, an overhead that consecutive kernels do not have."""
    with without_function_modes():
        number = torch.zeros((), device=device)
        return min(_run_synchronised(number.zero_, device)[1] for _ in range(10))


def work_of(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Bytes that an operator reads and writes, and its multiplications and additions; zeros if it makes only a view."""
    results = tensors_in(result)
    packet = function.overloadpacket
    if not results or function.is_view or "empty" in packet.__name__:
        return 0, 0
    operations = flop_registry.get(_COUNTED_AS.get(packet.__name__, packet), lambda *_, **__: 0)
    moved = sum(tensor.nbytes for tensor in [*tensors_in((args, kwargs)), *results] if is_ordinary(tensor))
    return moved, operations(*args, **kwargs, out_val=result)


_timed_device: ContextVar[torch.device | None] = ContextVar("timed_device", default=None)


@contextmanager
def times_of(device: str) -> Iterator[None]:
    """Context in which calls on fake tensors are timed as on this device, not their own; "meta": a typical GPU."""
    token = _timed_device.set(torch.device(device))
    try:
        yield
    finally:
        _timed_device.reset(token)


def seconds_for(moved: int, operations: int, result: Tensor | TensorSpec) -> float:
    """Seconds for this many bytes and operations, on the device of a result."""
    per_second, operations_per_second = _rates(_timed_device.get() or result.device, result.dtype)
    return moved / per_second + operations / operations_per_second


@cache
def _rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that a device reads or writes in a second, and multiplications and additions of a matrix product.

    Measured by a copy and a product; typical of recent GPUs if the device is not available.
    """
    is_cuda = device.type == "cuda"
    if not (is_cuda and torch.cuda.is_available() or device.type == "cpu"):
        return 1e12, 1e14 if dtype.itemsize <= 2 else 2e13
    size, width = (2**26, 2**12) if is_cuda else (2**23, 2**8)
    dtype = dtype if dtype.is_floating_point else torch.float32
    with without_dispatch_modes(), without_function_modes(), torch.no_grad():
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        square = torch.zeros(width, width, dtype=dtype, device=device)
        copying = shortest_seconds(lambda: target.copy_(source), device)
        multiplying = shortest_seconds(lambda: square @ square, device)
    return 2 * size / max(copying, 1e-9), 2 * width**3 / max(multiplying, 1e-9)
