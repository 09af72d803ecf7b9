"""Memory of a run: its peak, failed allocations as helpful errors, and freed memory that stays in the process."""

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Peak in MiB: of a CUDA device's tensors since the last reset; on the CPU, of the process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):  # no /proc, or one without this line
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if peak:
            return int(peak[1]) / 2**10
    # Also counts the parent process, if that used more.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def forget_peak(device: torch.device) -> None:
    """Reset the peak of a CUDA device's tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


_MEMORY_MESSAGES = (
    "out of memory",
    "insufficient memory",
    "can't allocate memory",
    "alloc_failed",
    "allocation_failed",
)
_CUDNN_MESSAGES = ("unable to find an engine", "unable to find a valid cudnn algorithm")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the CPU (also in OpenCV) or on a CUDA device (in PyTorch or CUDA's libraries).

    If cuDNN cannot allocate a convolution's workspace, it only reports that it found no engine or algorithm.
    """
    text = str(error).lower()
    has_message = any(message in text for message in _MEMORY_MESSAGES + _CUDNN_MESSAGES)
    return has_message or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def cause_of(error: Exception) -> str:
    """For messages: the cause of an error that `is_out_of_memory`. cuDNN has one message for two causes."""
    text = str(error).strip()
    if not any(message in text.lower() for message in _CUDNN_MESSAGES):
        return "out of memory"
    first_line = text.splitlines()[0]
    return f"out of memory, or cuDNN has no kernel for this precision and memory format ({first_line}: give others),"


@contextmanager
def memory_errors(where: str) -> Iterator[None]:
    """Context that turns an allocation failure into a MemoryError saying `where` it happened."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"{cause_of(error)} {where}") from error


def return_freed_memory() -> None:
    """Give freed memory back to the system (glibc only).

    Otherwise the heap fragments and grows, by 300 KiB for each image of a new size.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_freed_memory() -> bool:
    """Make the C library reuse freed memory, as CUDA's caching allocator does.

    By default glibc returns large freed buffers to the system and gets new ones page by page. That can cost several
    times as much as computing their values, or nothing, depending on the layout of the heap. Returns whether it
    worked (glibc only).
    """
    trim_threshold = -1  # from malloc.h
    mmap_max = -4
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
    except (OSError, AttributeError):
        return False
