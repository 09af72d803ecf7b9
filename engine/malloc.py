"""Keep freed memory in the process."""

import ctypes


def keep_freed_memory() -> bool:
    """Make the C library reuse freed memory, as CUDA's caching allocator does.

    By default glibc returns large freed buffers to the system and gets new ones page by page. That can cost several
    times as much as computing their values, or nothing, depending on their neighbours in memory.

    Returns:
        Whether it worked (glibc only).
    """
    trim_threshold, mmap_max = -1, -4  # from malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
    except (OSError, AttributeError):
        return False
