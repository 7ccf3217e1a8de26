"""One site process: the model and its engine thread, the tokenizer thread, the links, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from uuid import uuid4

from site_engine.config import SiteConfig
from site_engine.engine.engine_thread import Worker
from site_engine.engine_client import Listener
from site_engine.errors import ConfigError
from site_engine.federation.attempts import OnFinish
from site_engine.federation.dial import Dialling
from site_engine.federation.site import Site
from site_engine.messages import Hello, Model
from site_engine.native import Loaded, NativeEngine, grammars_of, load_engine
from site_engine.shutdown import EXIT_FAILED, Ending, tick, until_the_end
from site_engine.telemetry import logs
from site_engine.telemetry.attempt_log import attempt_log
from site_engine.text.tokenize import PromptTokenizer
from site_engine.version import own_version

log = logging.getLogger(__name__)


def run(config: SiteConfig) -> int:
    """Serves until a signal; the exit status of the process."""
    logs.set_up(config.log_level, config.site)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config) if config.engine == "native" else _serve_remote(config))
    except ConfigError as exc:
        log.critical("%s", exc)
        return EXIT_FAILED


async def serve(config: SiteConfig, load: Callable[[SiteConfig], Loaded] | None = None) -> int:
    """Loads the model, links to the gateways, serves, drains. Raises ConfigError if it cannot begin.

    The first SIGTERM or SIGINT drains; the second ends without waiting.
    """
    dialling = Dialling.of(config)
    loaded = await asyncio.to_thread(load or load_engine, config)
    async with attempt_log(config) as on_finish:
        return await _serve(config, loaded, dialling, on_finish)


async def _serve(config: SiteConfig, loaded: Loaded, dialling: Dialling, on_finish: OnFinish) -> int:
    loop = asyncio.get_running_loop()
    grammars = await asyncio.to_thread(grammars_of, loaded)
    tokenizer = PromptTokenizer(loaded.tokenizer, loaded.vocab_size, loop.call_soon_threadsafe, grammars)
    worker = Worker(loaded.engine, loop.call_soon_threadsafe, time.monotonic, config.iteration_floor_s)
    site = Site(
        _hello(config, loaded, tokenizer.features),
        NativeEngine(tokenizer, worker),
        time.monotonic,
        config.max_pending,
        on_finish=on_finish,
    )
    links = dialling.links(site)
    ending = Ending()
    ticking = asyncio.create_task(tick(site))
    worker.start(Listener(site.outputs, site.load, ending.broke))
    try:
        with ending.on_signals(loop):
            links.add(config.gateways)
            log.info("serving %s in %d slots", ", ".join(site.models), config.slots or loaded.slots)
            return await until_the_end(site, links, ending, config.drain_s)
    finally:
        ticking.cancel()
        await links.close("the site is ending")
        tokenizer.close()
        await asyncio.to_thread(worker.stop)


async def _serve_remote(config: SiteConfig) -> int:
    from site_engine.remote.process import serve as serve_remote

    return await serve_remote(config)


def _hello(config: SiteConfig, loaded: Loaded, features: tuple[str, ...]) -> Hello:
    kv_tokens = loaded.engine.load().kv_free_tokens  # nothing runs yet: all there is
    model = Model(
        id=config.served_model or loaded.name,
        revision=loaded.revision,
        context_tokens=min(loaded.context_tokens, kv_tokens),
        created_s=int(time.time()),
        features=features,
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
        version=own_version(),
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
