"""The ways to compute BN + ACT. `eager` is the reference; every other backend is tested against it."""

from torch import Tensor

from .eager import EagerBackend
from .interface import Backend, Kept, per_channel, update_running_statistics

BACKENDS = ("auto", "eager", "compiled", "triton")

__all__ = ["BACKENDS", "Backend", "Kept", "backend_for", "check_backend", "per_channel", "update_running_statistics"]


def check_backend(name: str) -> None:
    """Raise ValueError for a backend that does not exist or cannot run on this machine."""
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is not known; choose one of {', '.join(BACKENDS)}")


def backend_for(name: str, x: Tensor) -> Backend:
    """The backend that a layer asked for by name, for an input."""
    return EagerBackend()
