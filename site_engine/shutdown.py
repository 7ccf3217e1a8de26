"""The end of a site process: a first signal drains; a second, or a broken engine, ends it at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from site_engine.federation.link import Links
from site_engine.federation.site import Site

log = logging.getLogger(__name__)

TICK_S = 0.25
EXIT_OK, EXIT_FAILED = 0, 1


async def tick(site: Site) -> None:
    while True:
        site.tick()
        await asyncio.sleep(TICK_S)


class Shutdown:
    """Why and how fast the process is to end, and its exit status."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()
        self.reason = ""
        self.status = EXIT_OK
        self.starting = 0  # engines that start, also those given up, whose threads go on
        self._handling = 0

    def engine_broken(self, reason: str) -> None:
        self.status = EXIT_FAILED
        self.reason = f"the engine is broken: {reason}"
        self.immediate.set()
        self.requested.set()

    def on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            self.status = self.status or 128 + number
            self.immediate.set()
        else:
            self.reason = f"the site is ending ({number.name})"
            self.requested.set()

    @contextmanager
    def handle_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Handle SIGTERM and SIGINT, until the last of those that do so at once no longer does.

        Install nothing outside the main thread, which alone gets signals.
        """
        is_main = threading.current_thread() is threading.main_thread()
        handled = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        self._handling += 1
        for number in handled:
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            self._handling -= 1
            for number in handled if not self._handling else ():
                loop.remove_signal_handler(number)


async def is_first(task: asyncio.Task[Any], other: Awaitable[Any]) -> bool:
    """Wait for the task or the other, which then cancels the task; return whether the task was first."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run_until_shutdown(
    site: Site,
    links: Links,
    shutdown: Shutdown,
    drain_s: float,
    drain: Callable[[], Awaitable[object]] | None = None,
) -> int:
    """Wait for a shutdown, drain for at most `drain_s`, close the links; return the exit status.

    `drain` ends what else the site does.
    """
    await shutdown.requested.wait()
    if not shutdown.immediate.is_set():
        log.info("draining: %s; %d attempts still run", shutdown.reason, site.live)
        site.drain(shutdown.reason)
        idle = asyncio.Event()
        site.when_idle(idle.set)
        ends = [idle.wait()] if drain is None else [idle.wait(), drain()]
        waiting = [
            asyncio.ensure_future(asyncio.gather(*ends)),
            asyncio.create_task(shutdown.immediate.wait()),
        ]
        await asyncio.wait(waiting, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    log.info("ending with %d attempts left", site.live)
    await links.close(shutdown.reason)
    return shutdown.status
