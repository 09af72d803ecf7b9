"""Failed allocations become a MemoryError that says where; other errors stay as they are."""

import pytest
import torch

from engine.memory import is_out_of_memory, memory_errors


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
    with pytest.raises(MemoryError, match="^out of memory in step 3$"), memory_errors("in step 3"):
        raise error
    with pytest.raises(RuntimeError, match="^another one$"), memory_errors("in step 3"):
        raise RuntimeError("another one")
