"""One site in front of a server: found, linked to the gateways while it lives, unlinked when it does not.

Every time that the server comes (back), it is discovered anew: it may have other models or other limits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from uuid import uuid4

from site_engine.config import SLOTS, SiteConfig
from site_engine.engine_client import Listener
from site_engine.federation.attempts import OnFinish
from site_engine.federation.dial import Dialling
from site_engine.federation.site import Site
from site_engine.messages import Hello
from site_engine.remote.discovery import Found, alive, discover, look
from site_engine.remote.engine import RemoteEngine
from site_engine.remote.prometheus import UnknownPage
from site_engine.remote.server import Server, ServerLost
from site_engine.shutdown import EXIT_OK, Ending, tick, until_the_end
from site_engine.telemetry.attempt_log import attempt_log
from site_engine.version import own_version

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
PROBE_EVERY_S = 2.0
LISTED_EVERY_S = 15.0
"""Of a server without a health page, such as a provider: listing models is not free there."""
MISSED_MAX = 3
BACKOFF_FIRST_S, BACKOFF_LONGEST_S = 0.5, 15.0
SPARE_CONNECTIONS = 4


async def serve(config: SiteConfig) -> int:
    """Until a signal. Raises ConfigError if it cannot begin."""
    dialling = Dialling.of(config)
    root = config.url.rstrip("/").removesuffix("/v1")
    server = Server(
        root,
        config.server_key(os.environ),
        silence_s=config.silence_s,
        connections=(config.slots or SLOTS) + SPARE_CONNECTIONS,
    )
    ending = Ending()
    try:
        async with attempt_log(config) as on_finish:
            with ending.on_signals(asyncio.get_running_loop()):
                while True:
                    found = await _until_there(server, config, ending)
                    if found is None:
                        return EXIT_OK
                    status = await Service(server, config, found, ending, on_finish).run(dialling)
                    if status is not None:
                        return status
    finally:
        await server.close()


async def _until_there(server: Server, config: SiteConfig, ending: Ending) -> Found | None:
    """None: told to end before it came."""
    backoff_s = BACKOFF_FIRST_S
    while not ending.began.is_set():
        try:
            return await discover(server, config)
        except ServerLost as exc:
            log.warning("waiting for the server: %s", exc)
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await ending.began.wait()
        backoff_s = min(BACKOFF_LONGEST_S, backoff_s * 2)
    return None


class Service:
    """The site while its server is there."""

    def __init__(
        self, server: Server, config: SiteConfig, found: Found, ending: Ending, on_finish: OnFinish
    ) -> None:
        self._server = server
        self._config = config
        self._found = found
        self._ending = ending
        self._gone = asyncio.Event()
        self._why = ""
        nobody = Listener(lambda _: None, lambda _: None, self._broke)
        self._engine = RemoteEngine(server, found.terms, nobody, time.monotonic)
        self._site = Site(_hello(config, found), self._engine, time.monotonic, 1, on_finish=on_finish)
        self._engine.listener = Listener(self._site.outputs, self._site.load, self._broke)

    async def run(self, dialling: Dialling) -> int | None:
        """The status of the process if it is to end; None if the server is gone."""
        links = dialling.links(self._site)
        watching = [asyncio.create_task(each) for each in (tick(self._site), self._watch())]
        ends = asyncio.create_task(until_the_end(self._site, links, self._ending, self._config.drain_s))
        gone = asyncio.create_task(self._gone.wait())
        try:
            links.add(self._config.gateways)
            log.info("serving %s; load from %s", ", ".join(self._site.models), self._found.source)
            await asyncio.wait((ends, gone), return_when=asyncio.FIRST_COMPLETED)
            if ends.done() or self._ending.began.is_set():
                return await ends
            log.error("the server is lost: %s", self._why)
            return None
        finally:
            for task in (*watching, ends, gone):
                task.cancel()
            self._engine.fail_all(self._why or "the site is ending")
            await links.close(self._why or "the site is ending")

    def _broke(self, why: str) -> None:
        self._why = self._why or why
        self._gone.set()

    async def _watch(self) -> None:
        """Its metrics where it has them, else its probe; lost after several misses in a row."""
        missed, degraded = 0, False
        while True:
            try:
                degraded = await self._look(degraded)
                missed = 0
            except ServerLost as exc:
                missed += 1
                if missed >= MISSED_MAX:
                    self._broke(f"{missed} probes in a row failed, the last: {exc}")
                    return
            await asyncio.sleep(self._pause_s(quick=missed > 0))

    async def _look(self, degraded: bool) -> bool:
        """Whether the metrics page, which was understood at first, no longer is."""
        if not self._found.has_metrics:
            await alive(self._server, self._found.probe)
            return degraded
        try:
            self._engine.seen(await look(self._server, self._found.terms.dialect))
        except UnknownPage as exc:
            self._engine.unseen()
            if not degraded:
                log.warning("load is estimated from what passes through: %s", exc)
            return True
        return False

    def _pause_s(self, *, quick: bool) -> float:
        if quick or self._found.has_metrics:
            return LOOK_EVERY_S
        return PROBE_EVERY_S if self._found.probe != "/v1/models" else LISTED_EVERY_S


def _hello(config: SiteConfig, found: Found) -> Hello:
    terms = found.terms
    return Hello(
        site=config.site,
        boot_id=uuid4().hex,
        cloud=config.cloud,
        region=config.region,
        pool=config.pool,
        models=found.models,
        slots=terms.slots,
        kv_capacity_tokens=terms.kv_capacity_tokens,
        input_usd_per_mtok=config.input_usd_per_mtok,
        output_usd_per_mtok=config.output_usd_per_mtok,
        version=f"{own_version()} ({terms.dialect.name}, load from {found.source})"[:200],
        engine="openai",
    )
