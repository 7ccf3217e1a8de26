"""Compose and run one site process: the engine, the tokenizer, the links to the gateways, the shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from site_engine.config import SiteConfig
from site_engine.core.chain import Block, BlockKind, Variant
from site_engine.core.training import Trains
from site_engine.engine.device_turns import SharedDevice
from site_engine.engine.loading import Loaded, load_engine
from site_engine.engine.process_spawn import Spawn, spawn
from site_engine.engine_client import Facts, Listener, LoadSeen
from site_engine.errors import ConfigError
from site_engine.federation.dial import Dialer
from site_engine.federation.site import Site
from site_engine.federation.training import TrainingRuns
from site_engine.group import Group, Tuning, Wanted
from site_engine.messages import Hello, Model, OnFinish
from site_engine.native import NativeEngine, launch_engine
from site_engine.optional_packages import UNUSED, hide, hide_torch
from site_engine.process_settings import set_up_collector, set_up_process
from site_engine.shutdown import EXIT_FAILED, Shutdown, is_first, run_until_shutdown, tick
from site_engine.telemetry import logs
from site_engine.telemetry.attempt_log import attempt_log
from site_engine.version import own_version

log = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 3
"""Number of engines lost soon after their start, after which the site's process ends with an error."""
SETTLED_AFTER_S = 300.0
"""Seconds of serving after which the loss of an engine no longer counts as soon."""


def run(configs: Sequence[SiteConfig], spawn: Spawn = spawn) -> int:
    """Serve until a signal. Return the exit status. Several configurations are groups in one process.

    `spawn` starts the process of an engine.
    """
    config, *others = configs
    set_up_process()
    logs.set_up(config.log_level, config.site.rpartition("/")[0] if others else config.site)
    hide(*UNUSED)
    if all(each.separates_engine and not each.training for each in configs):
        hide_torch()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        shutdown = Shutdown()
        try:
            if others:
                status = runner.run(serve_groups(configs, spawn=spawn, shutdown=shutdown))
            elif config.engine == "native":
                status = runner.run(serve(config, spawn=spawn, shutdown=shutdown))
            else:
                from site_engine.remote_site import serve as serve_remote  # needs no torch

                status = runner.run(serve_remote(config))
        except ConfigError as exc:
            log.critical("%s", exc)
            status = EXIT_FAILED
        if shutdown.starting:  # threads load an engine for nobody
            logging.shutdown()
            os._exit(status)
        return status


async def serve(
    config: SiteConfig,
    load: Callable[[SiteConfig], Loaded] | None = None,
    spawn: Spawn = spawn,
    shutdown: Shutdown | None = None,
) -> int:
    """Load the model, link to the gateways, serve, drain. Raises ConfigError if the site cannot start.

    The first SIGTERM or SIGINT drains; the second ends at once. `load` creates the engine in this process.
    Without `load`, `config` decides whether the engine runs in a process of its own, started by `spawn`.
    """
    shutdown = shutdown or Shutdown()
    dialer = Dialer.from_config(config)
    if load is None and config.separates_engine:
        async with attempt_log(config.site, config.otlp_url) as on_finish:
            return await _serve_process(config, dialer, on_finish, shutdown, spawn)
    loop = asyncio.get_running_loop()
    with shutdown.handle_signals(loop):
        post = loop.call_soon_threadsafe
        loading = asyncio.create_task(asyncio.to_thread(_load_here, config, load or load_engine, post))
        if not await _started(loading, shutdown):
            return shutdown.status
        engine, facts = loading.result()
        set_up_collector()
        async with attempt_log(config.site, config.otlp_url) as on_finish:
            served = Served(engine, facts, shutdown.engine_broken, configured_variants(config))
            return await _serve(config, served, dialer, on_finish, shutdown)


def _load_here(
    config: SiteConfig,
    load: Callable[[SiteConfig], Loaded],
    post: Callable[[Callable[[], None]], object],
) -> tuple[NativeEngine, Facts]:
    """Load the engine in this process. `post` schedules a call on the event loop."""
    loaded, special = load(config), config.allow_special_tokens
    engine = NativeEngine.from_loaded(loaded, post, config.iteration_floor_s, allow_special_tokens=special)
    return engine, loaded.facts


async def serve_groups(
    configs: Sequence[SiteConfig],
    load: Callable[[SiteConfig], Loaded] | None = None,
    spawn: Spawn = spawn,
    shutdown: Shutdown | None = None,
) -> int:
    """Serve several groups, each a site of its own, until a signal or until one of them fails.

    Engines in this process are loaded one after another, and take turns on the device. Raises ConfigError if
    a group cannot start.
    """
    shutdown = shutdown or Shutdown()
    device, loading = SharedDevice(time.monotonic), threading.Lock()

    def load_shared(config: SiteConfig) -> Loaded:
        with loading:
            loaded = (load or load_engine)(config)
        return loaded._replace(engine=device.engine(loaded.engine))

    async def serve_one(config: SiteConfig) -> None:
        load = None if config.separates_engine else load_shared
        status = await serve(config, load, spawn, shutdown)
        if not shutdown.requested.is_set():
            shutdown.engine_broken(f"that of {config.site} ended with status {status}")

    try:
        async with asyncio.TaskGroup() as serving:
            for config in configs:
                serving.create_task(serve_one(config))
    except* ConfigError as failed:
        raise failed.exceptions[0] from failed
    return shutdown.status


class Served(NamedTuple):
    """An engine to serve with, and the variants `wanted`. `on_broken` is called once with the reason of a
    failure.
    """

    engine: NativeEngine
    facts: Facts
    on_broken: Callable[[str], None]
    wanted: dict[str, Wanted]


async def _serve_process(
    config: SiteConfig, dialer: Dialer, on_finish: OnFinish, shutdown: Shutdown, spawn: Spawn
) -> int:
    """Serve with an engine in a process of its own, and restart the process when it is lost.

    Between two engines the site has no links, so gateways resume its answers at other sites. Raises
    ConfigError if the model cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    lost_in_a_row, wanted = 0, configured_variants(config)
    with shutdown.handle_signals(loop):
        while lost_in_a_row < MAX_LOST_IN_A_ROW:
            launching = asyncio.create_task(launch_engine(config, loop.call_soon_threadsafe, spawn))
            if not await _started(launching, shutdown):
                return shutdown.status
            engine, facts = launching.result()
            lost: asyncio.Future[str] = loop.create_future()
            served = Served(engine, facts, partial(_lose, lost, shutdown), wanted)
            began_s = time.monotonic()
            serving = asyncio.create_task(_serve(config, served, dialer, on_finish, shutdown))
            if await is_first(serving, lost):
                return serving.result()
            settled = time.monotonic() - began_s > SETTLED_AFTER_S
            lost_in_a_row = 1 if settled else lost_in_a_row + 1
            log.error("the engine is lost: %s", lost.result())
    log.critical("the engine was lost %d times in a row", lost_in_a_row)
    return EXIT_FAILED


async def _serve(
    config: SiteConfig, served: Served, dialer: Dialer, on_finish: OnFinish, shutdown: Shutdown
) -> int:
    engine, facts, on_broken, wanted = served
    site = Site(
        make_hello(config, facts, engine),
        engine,
        time.monotonic,
        config.max_pending,
        on_finish=on_finish,
        on_stuck=on_broken,
        stream_interval_s=config.stream_interval_s,
    )
    group = Group(config, engine, site, wanted)
    links = dialer.links(site)
    ticking = asyncio.create_task(tick(site))
    async with training_runs(config, engine, site, group) as runs:

        def load(seen: LoadSeen) -> None:
            group.load(seen)
            site.load(seen)

        training = {"training": runs.heard} if runs else {}
        engine.start(Listener(site.outputs, load, on_broken, refused=group.refused, **training))
        group.load_wanted()
        try:
            links.add(config.gateways)
            log.info("serving %s in %d slots", ", ".join(site.models), facts.slots)
            drain = runs.drain if runs else None
            return await run_until_shutdown(site, links, shutdown, config.drain_s, drain)
        finally:
            ticking.cancel()
            await links.close(shutdown.reason or "its engine is lost")
            await asyncio.to_thread(engine.stop)


@asynccontextmanager
async def training_runs(
    config: SiteConfig, engine: NativeEngine, site: Site, group: Group
) -> AsyncIterator[TrainingRuns | None]:
    """Accept training orders if the configuration enables them. Adapters are in a folder that is removed at
    the end.
    """
    if not config.training:
        yield None
        return
    from site_engine.engine.training_loop import MAX_JOBS
    from site_engine.training.archive import pack, unpack
    from site_engine.training.temporary_folder import temporary_folder

    (base,) = site.hello().models
    runs = TrainingRuns(
        site, engine.trainer, base, MAX_JOBS, pack=pack, serve=group.serve_adapter, clock=time.monotonic
    )
    with temporary_folder("mico-adapters-") as folder:
        group.tuning = Tuning(runs.fetch, unpack, folder)
        reporting = asyncio.create_task(runs.report_forever())
        try:
            yield runs
        finally:
            reporting.cancel()
            await runs.close()


def _lose(lost: asyncio.Future[str], shutdown: Shutdown, reason: str) -> None:
    """Record that the engine is lost. A site that is shutting down starts no other."""
    if shutdown.requested.is_set():
        shutdown.engine_broken(reason)
    elif not lost.done():
        lost.set_result(reason)


async def _started(starting: asyncio.Task[Any], shutdown: Shutdown) -> bool:
    """Wait for an engine to start. Return False if the site shuts down first."""
    shutdown.starting += 1
    if await is_first(starting, shutdown.requested.wait()):
        shutdown.starting -= 1
        return True
    log.info("ending while the engine starts: %s", shutdown.reason)
    return False


def configured_variants(config: SiteConfig) -> dict[str, Wanted]:
    return {each.id: Wanted(Variant(*each)) for each in config.variants}


def announced_training(config: SiteConfig, facts: Facts) -> Trains | None:
    """Return what the site can train: on a GPU, only adapters that fit the slots of its engine."""
    if not config.training or (config.on_gpu and not facts.slots_bytes):
        return None
    from site_engine.engine.training_loop import MAX_JOBS
    from site_engine.variants.peft_folder import MAX_RANK
    from site_engine.variants.projections import largest_rank

    max_rank = largest_rank(config) if config.on_gpu else MAX_RANK
    return Trains(MAX_JOBS, max_rank, config.training_usd_per_mtok)


def make_hello(config: SiteConfig, facts: Facts, engine: NativeEngine) -> Hello:
    model = Model(
        id=config.served_model or facts.name,
        revision=facts.revision,
        context_tokens=min(facts.context_tokens, facts.kv_tokens),
        created_s=int(time.time()),
        features=engine.features,
        max_token_chars=engine.max_token_chars or 0,
        blocks=tuple(
            Block("", kind, 0, 0, size)
            for kind, size in ((BlockKind.BASE, facts.weights_bytes), (BlockKind.SLOTS, facts.slots_bytes))
            if size
        ),
    )
    return Hello(
        site=config.site,
        boot_id=uuid4().hex,
        cloud=config.cloud,
        region=config.region,
        pool=config.pool,
        models=(model,),
        slots=facts.slots,
        kv_capacity_tokens=facts.kv_tokens,
        input_usd_per_mtok=config.input_usd_per_mtok,
        output_usd_per_mtok=config.output_usd_per_mtok,
        cached_usd_per_mtok=config.cached_usd_per_mtok,
        usd_per_hour=config.usd_per_hour,
        version=own_version(),
        takes_orders=True,
        trains=announced_training(config, facts),
    )


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
