"""How glibc's allocator holds on to what a long-lived process has freed.

A producer makes and drops the same few megabytes for days: answers, samples, buffers. By default
every thread has an arena of its own, and each large block that is freed raises the size from which
blocks are mapped instead of cut from the heap. So the resident memory creeps up while the live
objects stay the same; with these settings it does not.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_SETTINGS = {_M_ARENA_MAX: 2, _M_MMAP_THRESHOLD: 64 << 10, _M_TRIM_THRESHOLD: 128 << 10}


def return_freed_memory() -> None:
    """Give freed blocks back to the system. Does nothing where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)
