"""Compose and run one site process: the engine, the tokenizer, the links to the gateways, the shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from uuid import uuid4

from site_engine.config import SiteConfig
from site_engine.engine_client import Listener
from site_engine.errors import ConfigError
from site_engine.federation.dial import Dialer
from site_engine.federation.site import Site
from site_engine.messages import Hello, Model, OnFinish
from site_engine.native import Loaded, NativeEngine, load_engine
from site_engine.shutdown import EXIT_FAILED, Shutdown, run_until_shutdown, tick
from site_engine.telemetry import logs
from site_engine.telemetry.attempt_log import attempt_log
from site_engine.version import own_version

log = logging.getLogger(__name__)


def run(config: SiteConfig) -> int:
    """Serve until a signal; return the exit status of the process."""
    logs.set_up(config.log_level, config.site)
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            if config.engine == "native":
                return runner.run(serve(config))
            from site_engine.remote_site import serve as serve_remote  # needs no torch

            return runner.run(serve_remote(config))
    except ConfigError as exc:
        log.critical("%s", exc)
        return EXIT_FAILED


async def serve(config: SiteConfig, load: Callable[[SiteConfig], Loaded] | None = None) -> int:
    """Load the model, link to the gateways, serve, drain. Raises ConfigError if that cannot begin.

    The first SIGTERM or SIGINT drains; the second ends without waiting.
    """
    dialer = Dialer.from_config(config)
    loaded = await asyncio.to_thread(load or load_engine, config)
    async with attempt_log(config.site, config.otlp_url) as on_finish:
        return await _serve(config, loaded, dialer, on_finish)


async def _serve(config: SiteConfig, loaded: Loaded, dialer: Dialer, on_finish: OnFinish) -> int:
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(
        NativeEngine.from_loaded,
        loaded,
        loop.call_soon_threadsafe,
        config.iteration_floor_s,
        allow_special_tokens=config.allow_special_tokens,
    )
    hello = make_hello(config, loaded, engine.features, engine.max_token_chars or 0)
    shutdown = Shutdown()
    site = Site(
        hello,
        engine,
        time.monotonic,
        config.max_pending,
        on_finish=on_finish,
        on_stuck=shutdown.engine_broken,
        stream_interval_s=config.stream_interval_s,
    )
    links = dialer.links(site)
    ticking = asyncio.create_task(tick(site))
    engine.start(Listener(site.outputs, site.load, shutdown.engine_broken))
    try:
        with shutdown.handle_signals(loop):
            links.add(config.gateways)
            log.info("serving %s in %d slots", ", ".join(site.models), config.slots or loaded.slots)
            return await run_until_shutdown(site, links, shutdown, config.drain_s)
    finally:
        ticking.cancel()
        await links.close("the site is ending")
        await asyncio.to_thread(engine.stop)


def make_hello(config: SiteConfig, loaded: Loaded, features: tuple[str, ...], max_token_chars: int) -> Hello:
    kv_tokens = loaded.engine.load().kv_free_tokens  # nothing runs yet, so this is the capacity
    model = Model(
        id=config.served_model or loaded.name,
        revision=loaded.revision,
        context_tokens=min(loaded.context_tokens, kv_tokens),
        created_s=int(time.time()),
        features=features,
        max_token_chars=max_token_chars,
    )
    return Hello(
        site=config.site,
        boot_id=uuid4().hex,
        cloud=config.cloud,
        region=config.region,
        pool=config.pool,
        models=(model,),
        slots=config.slots or loaded.slots,
        kv_capacity_tokens=kv_tokens,
        input_usd_per_mtok=config.input_usd_per_mtok,
        output_usd_per_mtok=config.output_usd_per_mtok,
        cached_usd_per_mtok=config.cached_usd_per_mtok,
        usd_per_hour=config.usd_per_hour,
        version=own_version(),
    )


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
