"""Turns stop signals into an asyncio event."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal


def stop_event() -> asyncio.Event:
    """Return an event that is set by SIGTERM, SIGINT or the end of the process that started this worker."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    parent = multiprocessing.parent_process()
    if parent is not None:  # this is a worker, which ends with its parent process
        sentinel = parent.sentinel

        def ended() -> None:
            loop.remove_reader(sentinel)
            stop.set()

        loop.add_reader(sentinel, ended)
    return stop
