"""Import large packages without the garbage collector, which takes a tenth of the time and finds nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(name: str) -> Iterator[None]:
    """Pause the collector while the package `name` is imported, unless it is imported already.

    The collector never scans what exists afterwards: modules live as long as the process.
    """
    if name in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
