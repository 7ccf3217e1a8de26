"""Process settings of the gateway that differ from the defaults of Python and the system."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress

LARGE_BLOCK_BYTES, M_MMAP_THRESHOLD = 2**20, -3
"""The size from which malloc uses mmap, as for prompts of megabytes. By default, glibc raises its threshold
once such blocks were freed, and later ones stay with the process.
"""
SWITCH_S = 5e-4
"""The interval after which the event loop yields the GIL to a waiting thread. A forecast acquires the GIL two
or three times, and with Python's default each time takes up to 5 ms while the loop is busy.
"""
GC_THRESHOLDS = (5_000, 20, 20)
"""3 collections per 1,000 queries, 4 ms in total; with Python's default thresholds 70, 27 ms in total."""


def set_up_process() -> None:
    """Set the process's file limit, allocator and thread switching. Must be called before serving."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports "unlimited" but refuses that value
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the default is often 1,024
    with suppress(AttributeError, OSError):  # only glibc has mallopt
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    sys.setswitchinterval(SWITCH_S)


def set_up_collector() -> None:
    """Exclude all objects loaded so far from garbage collections, as they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
