"""Telling the C library to keep freed memory."""

import ctypes


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory of this process for its next allocation, as CUDA's caching allocator does.

    By default glibc returns large buffers to the system when they are freed and takes new ones page by page. That can
    cost several times as much as computing their values, or nothing, depending on their neighbours in memory.

    Returns:
        Whether the C library could be told (glibc only).
    """
    trim_threshold, mmap_max = -1, -4  # from malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
    except (OSError, AttributeError):
        return False
