"""What is advised where memory runs out can be followed."""

import itertools
import re

import pytest
import torch
from torch import nn

from engine.config import check_shares, typed
from engine.memory import is_out_of_memory, out_of_memory
from tests.runs import composed


def accepted(config, crops: int, processes: int, parts: int) -> bool:
    config.data.crops_per_minibatch, config.trainer.accumulation_steps = crops, parts
    try:
        check_shares(config, processes)
    except ValueError:
        return False
    return True


def test_no_process_is_advised_what_would_be_refused():
    """Each of them, for all shares of up to 16 crops; and what would be accepted is advised."""
    config = typed(composed("train_seg"))
    seen = set()
    for crops, processes, parts in itertools.product(range(2, 17), (1, 2, 3), (1, 2)):
        if not accepted(config, crops, processes, parts):
            continue
        for share in {crops // processes, -(-crops // processes)}:
            advice = out_of_memory((share, 3, 64, 64), parts, nn.Identity(), least_share=crops // processes)
            more_parts = re.search(r"half .*trainer\.accumulation_steps=(\d+)", advice)
            assert more_parts is None or int(more_parts[1]) == 2 * parts
            assert bool(more_parts) == accepted(config, crops, processes, 2 * parts)
            assert ("twice as many processes" in advice) == accepted(config, crops, 2 * processes, parts)
            seen.add((crops, processes, share, bool(more_parts)))
    assert (7, 2, 4, False) in seen and (8, 2, 4, True) in seen


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),  # of the driver: the device was full before
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_every_kind_of_a_failed_allocation_is_known(error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
