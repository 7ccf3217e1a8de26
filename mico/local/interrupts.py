"""Signals that end a program: all raise KeyboardInterrupt, which a critical section can delay."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_at_end_signals() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C; a signal that is ignored, as under nohup, stays ignored."""
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt during the block until its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def record(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, record)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
