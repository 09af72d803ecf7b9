"""What operators cost: seconds, and the bytes that they take while they run."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private import FakeTensor

_BYTES_PER_SECOND = 1e10
_OPERATIONS_PER_SECOND = 1e11
_PRODUCTS = frozenset("matmul __matmul__ mm bmm addmm baddbmm".split())


class Temporaries(NamedTuple):
    """Bytes that an operator takes while it runs, beside its arguments and results."""

    forward: int
    backward: int


_measured: dict[Any, Temporaries] = {}


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Largest number of bytes of tensors allocated at any moment of a step, beyond those allocated before it.

    `device`: its type. On CUDA this resets the peak that PyTorch's allocator counts.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    # The profiler sees every allocation on the CPU, also in compiled code. Its log is hidden.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def temporaries(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Temporaries:
    """Measure a convolution of these shapes, once: libraries reorder tensors, or need a workspace."""
    given = [*arguments, *options.values()]
    key = (function, len(arguments), tuple(options), *map(_form, given))
    if key not in _measured:
        fake = any(isinstance(one, FakeTensor) for one in given)
        _measured[key] = Temporaries(0, 0) if fake else _temporaries(function, arguments, options)
    return _measured[key]


def _form(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device, argument.requires_grad
    return tuple(argument) if isinstance(argument, list) else argument


def _temporaries(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Temporaries:
    def like(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        zeros = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
        return zeros.zero_().requires_grad_(argument.requires_grad)

    inputs, named = [like(argument) for argument in arguments], {name: like(value) for name, value in options.items()}
    device = inputs[0].device.type
    with torch.enable_grad():
        result = function(*inputs, **named)
        gradient = torch.zeros_like(result)
        leaves = [one for one in (*inputs, *named.values()) if isinstance(one, Tensor) and one.requires_grad]
        forward = peak_bytes(lambda: function(*inputs, **named), device) - result.nbytes
        backward = peak_bytes(lambda: torch.autograd.grad(result, leaves, gradient), device)
        return Temporaries(max(forward, 0), max(backward - sum(leaf.nbytes for leaf in leaves), 0))


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of a call, and the seconds that it takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def estimated_seconds(function: Callable[..., Any], arguments: Sequence[Any], result: Tensor) -> float:
    """For fake tensors: from bytes and multiplications, as far as it matters which of two calls takes longer."""
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    name, length = getattr(function, "__name__", ""), 0  # of the products that a value of the result sums up
    if name == "scaled_dot_product_attention":
        length = 2 * tensors[1].shape[-2] * tensors[0].shape[-1] // result.shape[-1]
    elif "conv" in name or name == "linear":
        length = tensors[1].numel() // tensors[1].shape[0]
    elif name in _PRODUCTS:
        length = tensors[-2].shape[-1]
    moved = result.nbytes + sum(tensor.nbytes for tensor in tensors)
    return moved / _BYTES_PER_SECOND + 2 * length * result.numel() / _OPERATIONS_PER_SECOND
