"""Backends for BN + activation. `eager` is the reference that the others are tested against."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ...torch_internals import FakeTensor, dispatch_modes_on, warn
from .compiled import CompiledBackend, compiler_available, prefers_compiled
from .eager import EagerBackend
from .interface import Backend, FusedShapes

BACKENDS = ("auto", "eager", "compiled", "triton")


def check_backend(name: str) -> None:
    """Raise ValueError if a backend does not exist or is not installed."""
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is not known; choose one of {', '.join(BACKENDS)}")
    if name == "triton" and _triton_kernels() is None:
        raise ValueError("backend='triton' needs the package triton, which is not installed; choose backend='auto'")


def backend_for(name: str, x: Tensor) -> Backend:
    """The backend of this name for an input.

    "auto" means `triton` on CUDA if it can launch kernels, `compiled` on the CPU if `prefers_compiled` says so, and
    otherwise `eager`. Inside `torch.compile` the backend is always `compiled`, whose formulas fuse with the surrounding
    code. Outside, it is `eager` for empty tensors, while `torch.jit.trace` records, and under tools that watch
    operations (FLOP or memory counters), which cannot see inside a fused kernel. Fake tensors get `FusedShapes`
    if a fused kernel is requested, or would run on their device.

    ValueError if the backend cannot compute on the device or in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return CompiledBackend()
    is_watched = type(x) not in (Tensor, Parameter) or dispatch_modes_on() > 0 or torch.jit.is_tracing()
    if isinstance(x, FakeTensor) and (name in ("compiled", "triton") or (name == "auto" and _has_kernels_for(x))):
        return FusedShapes()
    if name == "eager" or is_watched or x.numel() == 0:
        return EagerBackend()
    if name == "auto":
        return _fastest_backend(x)
    if name == "compiled":
        return CompiledBackend()
    assert name == "triton", name
    kernels = _triton_kernels()
    assert kernels is not None  # otherwise `check_backend` raised
    if not kernels.supports(x):
        raise ValueError(
            f"backend='triton' got a {x.dtype} tensor on {x.device.type}: expected float32, bfloat16 or float16 on "
            f"{'the CPU, because TRITON_INTERPRET is set' if kernels.INTERPRETED else 'CUDA'}; choose backend='auto'"
        )
    return kernels.TritonBackend()


def _fastest_backend(x: Tensor) -> Backend:
    if x.device.type == "cuda":
        launches = _has_kernels_for(x) and triton_launches(x.device)
        return _triton_kernels().TritonBackend() if launches else EagerBackend()
    return CompiledBackend() if prefers_compiled(x) and compiler_available("cpu") else EagerBackend()


def _has_kernels_for(x: Tensor) -> bool:
    """Whether a CUDA tensor has kernels, if they can be launched."""
    kernels = _triton_kernels() if x.device.type == "cuda" else None
    return kernels is not None and kernels.supports(x)


@cache
def triton_launches(device: torch.device) -> bool:
    """Whether Triton can launch kernels on a CUDA device, for which it needs a C compiler. Tried once; warns if not."""
    try:
        _triton_kernels().launch_small_kernel(device)
    except Exception as error:  # missing compilers, headers and libraries raise different errors
        reason = str(error).partition("\n")[0]
        warn(
            f"Triton cannot launch kernels on {device} ({reason}), so the layers use backend='eager', which is slower: "
            f"install a C compiler (gcc, or set CC) and Python's headers"
        )
        return False
    return True


@cache
def _triton_kernels() -> Any:
    """The module `triton_kernels`, or None if triton is not installed."""
    try:
        from . import triton_kernels
    except ImportError:
        return None
    return triton_kernels
