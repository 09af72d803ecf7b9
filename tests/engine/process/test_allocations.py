"""Failed allocations become a MemoryError that says where; other errors stay as they are. Peaks are of one process."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.prediction import open_network
from engine.process.allocations import is_out_of_memory, memory_errors
from tests.checkpoints import saved
from tests.runs import REPOSITORY, run_config


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),  # from the driver: the device was full already
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),  # a convolution's workspace
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_every_kind_of_a_failed_allocation_is_known(error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    kernels = f", or cuDNN has no kernel for this precision and memory format \\({error}: give others\\),"
    causes = kernels if "nable to find" in str(error) else ""
    with pytest.raises(MemoryError, match=f"^out of memory{causes} in step 3$"), memory_errors("in step 3"):
        raise error
    with pytest.raises(RuntimeError, match="^another one$"), memory_errors("in step 3"):
        raise RuntimeError("another one")


@pytest.mark.slow
def test_the_peak_does_not_count_the_process_that_started_this_one():
    """The system hands a process the peak of its parent on: a notebook of 10 GiB would make every run's 10 GiB."""
    code = "import torch; from engine.process.allocations import *; print(peak_memory_mib(torch.device('cpu')))"
    parent = f"import subprocess, sys; len(b'x' * 2**30); sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    command = [sys.executable, "-c", parent]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert 20 < float(printed) < 900


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say how much is resident")
def test_images_of_many_sizes_leave_no_memory_behind(tmp_path):
    """The heap would grow by 100 MiB in 300 images; oneDNN's cache of kernels alone grows for a while, by 25 MiB."""
    saved(tmp_path / "last.pt", run_config("data=camvid"), [*"abcde"], palette=[[number] * 3 for number in range(5)])
    network, draw, resident_mib = open_network(tmp_path / "last.pt"), random.Random(0), []
    for number in range(400):
        network.predict(np.zeros((draw.randrange(64, 320), draw.randrange(64, 320), 3), np.uint8))
        if number in (99, 399):
            resident_mib.append(
                int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 2**10
            )  # MiB that are resident
    assert resident_mib[1] - resident_mib[0] < 60
