"""Marks for tests that need a device, or what PyTorch can do without one."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")]
FSDP2_ON_CPUS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this PyTorch does not run on CPUs"
)


@contextmanager
def no_waits() -> Iterator[None]:
    """Context in which the host waits nowhere for the device, as PyTorch's own check sees it."""
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not [wait for wait in waits if "called a synchronizing" in str(wait.message)]
