"""Settings of the gateway's process that Python or the system would choose otherwise."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress

LARGE_BLOCK_BYTES, M_MMAP_THRESHOLD = 2**20, -3
"""Of a prompt of megabytes. By glibc's own rule such blocks stay with the process once some were freed."""
SWITCH_S = 5e-4
"""After which the event loop gives up the interpreter to a thread that waits. A forecast takes it up two or
three times, each time after up to 5 ms by Python's own setting while the loop is busy.
"""
GC_THRESHOLDS = (5_000, 20, 20)
"""In 1,000 queries 3 collections, 4 ms in total; by Python's own thresholds 70, 27 ms in total."""


def set_up_process() -> None:
    """Set the limits of the process, its allocator and its threads; call it before anything is served."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls it unlimited and refuses to have it set so
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # 1,024 are usual
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    sys.setswitchinterval(SWITCH_S)


def set_up_collector() -> None:
    """Leave what is loaded by now out of garbage collections: it lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
