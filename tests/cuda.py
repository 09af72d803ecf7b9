"""Marks for tests that need a device, or what PyTorch can do without one."""

import pytest
import torch

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")]
FSDP2_ON_CPUS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this PyTorch does not run on CPUs"
)
