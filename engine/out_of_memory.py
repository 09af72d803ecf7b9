"""Allocation failures, and the errors that say what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_out_of_memory(error: RuntimeError | ValueError | TypeError) -> bool:
    """Whether an allocation failed: on a CUDA device, in PyTorch or in CUDA's own libraries, or in the CPU's memory."""
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


@contextmanager
def memory_errors(where: str) -> Iterator[None]:
    """Turns an allocation failure into a MemoryError that says `where` it happened."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory {where}") from error
