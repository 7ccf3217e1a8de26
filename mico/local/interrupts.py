"""Ctrl-C, and what else ends a program: one interrupt for all, that can wait for what must not be cut."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_at_any_end() -> None:
    """SIGTERM, and the end of the terminal, as Ctrl-C; what is ignored, as under nohup, stays so."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised when the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, own in before.items():
        if own is not signal.SIG_IGN:
            signal.signal(number, keep)
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
        if came:
            signal.raise_signal(came[0])
