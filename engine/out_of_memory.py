"""Recognise allocation failures, and turn them into helpful errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_out_of_memory(error: RuntimeError | ValueError | TypeError) -> bool:
    """Whether an allocation failed: in CPU memory, or on a CUDA device in PyTorch or CUDA's own libraries."""
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


@contextmanager
def memory_errors(where: str) -> Iterator[None]:
    """Context that turns an allocation failure into a MemoryError saying `where` it happened."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory {where}") from error
