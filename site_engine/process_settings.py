"""Settings of a site's processes that Python or PyTorch would choose otherwise."""

from __future__ import annotations

import gc
import os
import sys

SWITCH_S = 2e-4
"""After which a thread gives up the interpreter to one that waits. A step of the engine gives it up about
ten times and then waits each time for a thread that computes in Python: 50 ms with Python's own 5 ms. A
prompt that is read beside a busy event loop waits two or three times.
"""
PINNED_MEMORY = "pinned_use_cuda_host_register:True"
"""Memory is touched before CUDA pins it, not while the driver is locked. By default 18 MB for an adapter take
23 ms, and the engine's thread waits for the driver for up to 9 ms at once (H200, PyTorch 2.11).
"""
GC_THRESHOLDS = (500, 2_000, 100)
"""By Python's own thresholds an engine's full collections, of requests and cached pages, held up all answers
for 10 to 37 ms (8B on an H200, 30 queries a second). What a query leaves is freed without the collector,
which at each 500 objects more, as pages of the prefix cache are, looks at these alone: 2,000 took up to 2 ms.
"""


def set_up_process() -> None:
    """Set how threads take turns and how PyTorch pins memory; call it before PyTorch pins any.

    An environment that configures PyTorch's allocators is left as it is.
    """
    sys.setswitchinterval(SWITCH_S)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", PINNED_MEMORY)


def set_up_collector() -> None:
    """Leave what is loaded by now out of garbage collections, and collect the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
