"""Compose and run a site in front of a server: linked to the gateways while the server lives.

The server is discovered again each time it returns, because its models or limits may have changed.
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
from site_engine.errors import ConfigError
from site_engine.federation.dial import Dialer
from site_engine.federation.site import Site
from site_engine.messages import Hello, OnFinish
from site_engine.remote.count import MAX_COUNTS
from site_engine.remote.discovery import (
    MODELS_PATH,
    Discovery,
    check_alive,
    discover,
    fetch_load,
    refresh,
)
from site_engine.remote.engine import RemoteEngine
from site_engine.remote.prometheus import UnknownMetrics
from site_engine.remote.server import Server, ServerLost
from site_engine.shutdown import EXIT_OK, Shutdown, is_first, run_until_shutdown, tick
from site_engine.telemetry.attempt_log import attempt_log
from site_engine.version import own_version

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.5
PROBE_EVERY_S = 2.0
LIST_EVERY_S = 15.0
"""Interval for servers without a health page, such as providers, where listing models is not free."""
REFRESH_EVERY_S = 5.0
"""Interval of listing models, for adapters loaded at run time. A list of a thousand takes about 200 KB."""
MAX_MISSES = 3
BACKOFF_FIRST_S, MAX_BACKOFF_S = 0.5, 15.0
SPARE_CONNECTIONS = 4 + MAX_COUNTS
"""Connections beyond those of answers: for probes, cancelled requests and the counting of prompts."""


async def serve(config: SiteConfig) -> int:
    """Serve until a signal. Return the exit status. Raises ConfigError if the site cannot start."""
    dialer = Dialer.from_config(config)
    root = config.url.rstrip("/").removesuffix("/v1")
    server = Server(
        root,
        config.server_key(os.environ),
        silence_s=config.silence_s,
        connections=(config.slots or SLOTS) + SPARE_CONNECTIONS,
    )
    shutdown = Shutdown()
    try:
        async with attempt_log(config.site, config.otlp_url) as on_finish:
            with shutdown.handle_signals(asyncio.get_running_loop()):
                while True:
                    discovery = await _discover_patiently(server, config, shutdown)
                    if discovery is None:
                        return EXIT_OK
                    status = await Service(server, config, discovery, shutdown, on_finish).run(dialer)
                    if status is not None:
                        return status
    finally:
        await server.close()


async def _discover_patiently(server: Server, config: SiteConfig, shutdown: Shutdown) -> Discovery | None:
    """Wait until the server is reachable. Return None if the site shuts down first."""
    backoff_s = BACKOFF_FIRST_S
    while not shutdown.requested.is_set():
        discovering = asyncio.create_task(discover(server, config))
        if not await is_first(discovering, shutdown.requested.wait()):
            return None
        try:
            return discovering.result()
        except ServerLost as exc:
            log.warning("waiting for the server: %s", exc)
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await shutdown.requested.wait()
        backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
    return None


class Service:
    """The site while its server is reachable."""

    def __init__(
        self,
        server: Server,
        config: SiteConfig,
        discovery: Discovery,
        shutdown: Shutdown,
        on_finish: OnFinish,
    ) -> None:
        self._server = server
        self._config = config
        self._discovery = discovery
        self._shutdown = shutdown
        self._lost = asyncio.Event()
        self._reason = ""
        self._unlisted = ""  # why the models are not those that the server lists now
        self._engine = RemoteEngine(server, discovery.profile, time.monotonic)
        self._site = Site(
            make_hello(config, discovery),
            self._engine,
            time.monotonic,
            1,
            on_finish=on_finish,
            stream_interval_s=config.stream_interval_s,
        )
        self._engine.listener = Listener(self._site.outputs, self._site.load, self._lose)

    async def run(self, dialer: Dialer) -> int | None:
        """Return the exit status if the process must end, or None if the server is lost."""
        links = dialer.links(self._site)
        watching = [asyncio.create_task(each) for each in (tick(self._site), self._poll_forever())]
        ends = asyncio.create_task(
            run_until_shutdown(self._site, links, self._shutdown, self._config.drain_s)
        )
        lost = asyncio.create_task(self._lost.wait())
        try:
            links.add(self._config.gateways)
            log.info("serving %s; load from %s", ", ".join(self._site.models), self._discovery.load_source)
            await asyncio.wait((ends, lost), return_when=asyncio.FIRST_COMPLETED)
            if ends.done() or self._shutdown.requested.is_set():
                return await ends
            log.error("the server is lost: %s", self._reason)
            return None
        finally:
            for task in (*watching, ends, lost):
                task.cancel()
            # clients read this, and the reason may have the address of the server
            self._engine.fail_all(
                "the server behind this site is lost" if self._reason else "the site is ending"
            )
            await links.close(self._reason or "the site is ending")

    def _lose(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._lost.set()

    async def _poll_forever(self) -> None:
        """Poll the server's metrics, or its probe if it has none. Several consecutive misses mean that it is
        lost.
        """
        missed, degraded, refreshed_s = 0, False, time.monotonic()
        while True:
            try:
                degraded = await self._poll(degraded)
                if self._lists_models or time.monotonic() >= refreshed_s + REFRESH_EVERY_S:
                    refreshed_s = time.monotonic()
                    await self._refresh_models()
                missed = 0
            except ServerLost as exc:
                missed += 1
                if missed >= MAX_MISSES:
                    self._lose(f"{missed} probes in a row failed, the last: {exc}")
                    return
            if missed or (self._discovery.has_metrics and not degraded):
                await asyncio.sleep(POLL_EVERY_S)
            else:
                await asyncio.sleep(LIST_EVERY_S if self._lists_models else PROBE_EVERY_S)

    @property
    def _lists_models(self) -> bool:
        """Return whether only the list of models shows that the server is alive."""
        return not self._discovery.has_metrics and self._discovery.probe == MODELS_PATH

    async def _refresh_models(self) -> None:
        """Serve the models that the server lists now, such as new adapters. Raises ServerLost."""
        before = self._discovery
        try:
            found = await refresh(self._server, self._config, before)
        except ConfigError as exc:
            if str(exc) != self._unlisted:
                log.warning("the models stay as they are: %s", exc)
            self._unlisted = str(exc)
            return
        self._unlisted = ""
        if found is before:
            return
        self._discovery = found
        self._engine.set_profile(found.profile)
        self._site.set_models(found.models)
        names, known = ({each.id for each in models} for models in (found.models, before.models))
        log.info("the server's models have changed: %d came, %d went", len(names - known), len(known - names))

    async def _poll(self, degraded: bool) -> bool:
        """Poll once. Return whether the metrics page is temporarily not understood."""
        if self._lists_models:
            return degraded
        if not self._discovery.has_metrics:
            await check_alive(self._server, self._discovery.probe)
            return degraded
        try:
            self._engine.update_load(await fetch_load(self._server, self._discovery.profile.dialect))
        except UnknownMetrics as exc:
            self._engine.forget_load()
            if not degraded:
                log.warning("load is estimated from what passes through: %s", exc)
            await check_alive(self._server, self._discovery.probe)  # that page may outlive what it is about
            return True
        return False


def make_hello(config: SiteConfig, discovery: Discovery) -> Hello:
    profile = discovery.profile
    return Hello(
        site=config.site,
        boot_id=uuid4().hex,
        cloud=config.cloud,
        region=config.region,
        pool=config.pool,
        models=discovery.models,
        slots=profile.slots,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        input_usd_per_mtok=config.input_usd_per_mtok,
        output_usd_per_mtok=config.output_usd_per_mtok,
        cached_usd_per_mtok=config.cached_usd_per_mtok,
        usd_per_hour=config.usd_per_hour,
        version=f"{own_version()} ({profile.dialect.name}, load from {discovery.load_source})"[:200],
        engine="openai",
    )
