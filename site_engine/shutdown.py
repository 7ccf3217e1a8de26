"""How a site process lives and ends: a first signal drains; a second, or a broken engine, does not wait."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from site_engine.federation.link import Links
from site_engine.federation.site import Site

log = logging.getLogger(__name__)

TICK_S = 0.25
EXIT_OK, EXIT_FAILED = 0, 1


async def tick(site: Site) -> None:
    while True:
        site.tick()
        await asyncio.sleep(TICK_S)


class Ending:
    """Why and how fast the process is to end."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.hurried = asyncio.Event()
        self.reason = ""
        self.status = EXIT_OK

    def broke(self, reason: str) -> None:
        self.status = EXIT_FAILED
        self.reason = f"the engine is broken: {reason}"
        self.hurried.set()
        self.began.set()

    def signalled(self, number: signal.Signals) -> None:
        if self.began.is_set():
            self.status = self.status or 128 + number
            self.hurried.set()
        else:
            self.reason = f"the site is ending ({number.name})"
            self.began.set()

    @contextmanager
    def on_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Only the main thread of a process hears signals; elsewhere nothing is installed."""
        heard = (
            (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        )
        for number in heard:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)


async def until_the_end(site: Site, links: Links, ending: Ending, drain_s: float) -> int:
    await ending.began.wait()
    if not ending.hurried.is_set():
        log.info("draining: %s; %d attempts still run", ending.reason, site.live)
        site.drain(ending.reason, drain_s)
        await _drained(site, ending, drain_s)
    log.info("ending with %d attempts left", site.live)
    await links.close(ending.reason)
    return ending.status


async def _drained(site: Site, ending: Ending, drain_s: float) -> None:
    """Until nothing runs, the time is up, or somebody is in a hurry."""
    idle = asyncio.Event()
    site.when_idle(idle.set)
    waiting = [asyncio.create_task(event.wait()) for event in (idle, ending.hurried)]
    await asyncio.wait(waiting, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
