"""The ways to compute BN + ACT. `eager` is the reference; every other backend is tested against it."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .compiled import CompiledBackend, compiler_available, prefers_compiled
from .eager import EagerBackend
from .interface import Backend, Kept, update_running_statistics

BACKENDS = ("auto", "eager", "compiled", "triton")

__all__ = ["BACKENDS", "Backend", "Kept", "backend_for", "check_backend", "update_running_statistics"]


def check_backend(name: str) -> None:
    """Raise ValueError for a backend that does not exist, or not in this installation."""
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is not known; choose one of {', '.join(BACKENDS)}")
    if name == "triton" and _triton() is None:
        raise ValueError("backend='triton' needs the package triton, which is not installed; choose backend='auto'")


def backend_for(name: str, x: Tensor) -> Backend:
    """The backend that a layer asked for by name, for an input.

    "auto" is `triton` on CUDA, on the CPU what `prefers_compiled` says, and `eager` where those cannot run. Inside
    `torch.compile` it is always `compiled`, whose formulas the compiler fuses with what surrounds them. It is `eager`
    for empty tensors, and for those that tools look at (fake ones, counters of operations or memory): a tool would see
    nothing of a fused kernel.

    Raises:
        ValueError: the backend cannot compute on the device or in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return CompiledBackend()
    if name == "eager" or type(x) not in (Tensor, Parameter) or is_in_torch_dispatch_mode() or x.numel() == 0:
        return EagerBackend()
    if name == "auto":
        return _fastest(x)
    if name == "compiled":
        return CompiledBackend()
    assert name == "triton", name
    kernels = _triton()
    if not kernels.runs_on(x):
        raise ValueError(
            f"backend='triton' got a {x.dtype} tensor on {x.device.type}: expected float32, bfloat16 or float16 on "
            f"{'the CPU, as TRITON_INTERPRET is set' if kernels.INTERPRETED else 'CUDA'}; choose backend='auto'"
        )
    return kernels.TritonBackend()


def _fastest(x: Tensor) -> Backend:
    if x.device.type == "cuda":
        kernels = _triton()
        return kernels.TritonBackend() if kernels is not None and kernels.runs_on(x) else EagerBackend()
    return CompiledBackend() if prefers_compiled(x) and compiler_available(x.device.type) else EagerBackend()


@cache
def _triton():
    """The module of the Triton kernels, or None without the package."""
    try:
        from . import triton_kernels
    except ImportError:
        return None
    return triton_kernels
