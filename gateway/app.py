"""Compose one gateway process: start its parts in order, and end them in reverse order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access
from gateway.admin.batches import batch_reads
from gateway.admin.models import SiteModels
from gateway.admin.order_service import OrderService
from gateway.admin.routes import AdminContext, admin_routes
from gateway.admin.tuning import tuning_reads
from gateway.batches.lifecycle import Batches, open_batches
from gateway.config import ConfigError, GatewayConfig
from gateway.core import Core, open_core
from gateway.domain import SiteState
from gateway.http.app import create_http, create_operators_http
from gateway.http.backend import Backend, Readiness
from gateway.http.batches import batch_routes
from gateway.http.body import BodyReader
from gateway.http.files import file_routes
from gateway.http.fine_tuning import tuning_routes
from gateway.http.message_batches import message_batch_routes
from gateway.http.server import ConnectionLimits, HttpServer, http_server
from gateway.job_host import JobHost
from gateway.listeners import ListenerCredentials, load_credentials
from gateway.process_settings import set_up_collector, set_up_process
from gateway.query.answer import answer
from gateway.query.counting import TokenCounter
from gateway.query.targets import NamedModels
from gateway.scaling.plan import ScalingPlan, read_plan
from gateway.scaling.scaler import Scaler, scaling
from gateway.side_work import SideWork
from gateway.signals import stop_event
from gateway.store.recorder_metrics import RecorderMetrics
from gateway.store.store import Store, open_store
from gateway.telemetry import logs
from gateway.telemetry.metrics import CONTENT_TYPE
from gateway.telemetry.replicas import SummaryExchange
from gateway.tuning.lifecycle import open_tuning
from gateway.tuning.service import TuningService

if TYPE_CHECKING:
    from gateway.telemetry.traces import Traces

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Seconds after `drain_s` for clients to receive the error that ends their answers."""
OPERATORS_CONNECTIONS = 100
SILENT_S = 2.0
"""Seconds without an answer of the database after which /ready reports it as unavailable."""


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain queries in flight for at most `drain_s` seconds. Return the
    exit code.
    """
    logs.configure(config.log_level)
    set_up_process()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(config))
    code: int = uvloop.run(serve(config))
    return code


async def serve(config: GatewayConfig) -> int:
    """Serve until a stop signal. Return the exit code: 1 if the server for clients never started, else 0."""
    stop = stop_event()
    pepper = config.key_pepper or None
    async with (
        open_store(
            config.database_url, config.folder, name=config.name, pepper=pepper, journal=config.worker
        ) as store,
        _traces(config) as traces,
        open_core(
            config, store, credentials := await load_credentials(config, store.certificates), traces
        ) as core,
        scaling(
            lambda: core.query_context.directory.sites, _scaling_plan(config), core.query_context.clock
        ) as scaler,
        _admin(core, store, scaler) as admin,
        open_batches(host := _job_host(config, core, store)) as batches,
        open_tuning(host) as tuning,
    ):
        core.metrics.register(scaler)
        core.metrics.register(RecorderMetrics(store.recorder))
        backend = _backend(config, core, store, host.side_work)
        access = Access(backend, store.keys.still_valid, store.keys.session_key, store.ended_sessions)
        tenants_routes = _tenants_routes(backend, access, batches, tuning.service)
        routes = [*admin_routes(backend, access, admin), *tenants_routes]
        server = _http(config, backend, routes, credentials)
        operators_server = _operators_http(config, core, backend)
        set_up_collector()
        serving = asyncio.create_task(server.serve())
        serving_operators = asyncio.create_task(operators_server.serve())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, serving_operators, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            log.info("draining %d queries for at most %.0f s", core.query_context.live, config.drain_s)
            core.publisher.close()  # open pages would keep the server from ending
            batches.runner.drain()
            server.should_exit = True
            asyncio.get_running_loop().call_later(config.drain_s, core.query_context.shut_down)
        stopping.cancel()
        await serving
        operators_server.should_exit = True
        await serving_operators
        await core.query_context.wait_settled()
        return 0 if server.started else 1


@asynccontextmanager
async def _traces(config: GatewayConfig) -> AsyncIterator[Traces | None]:
    """Yield the tracer, or None if no collector is configured, without importing OpenTelemetry."""
    if not config.otlp_url:
        yield None
        return
    try:
        from gateway.telemetry.traces import Traces, exporter
    except ModuleNotFoundError as exc:
        raise ConfigError("otlp_url needs OpenTelemetry, of the extra otel") from exc
    traces = Traces(config.name, exporter(config.otlp_url))
    try:
        yield traces
    finally:
        await asyncio.to_thread(traces.close)


@asynccontextmanager
async def _admin(core: Core, store: Store, scaler: Scaler) -> AsyncIterator[AdminContext]:
    """Run the parts behind the operators' API: publisher, orders and the exchange between replicas."""
    query_context, publisher = core.query_context, core.publisher
    directory, links, clock = query_context.directory, query_context.federation.links, store.clock
    order_service = OrderService(store.orders, directory, links, publisher, unix_time=clock)
    own_summary, show = (lambda: publisher.own_summary), publisher.events.add
    exchange = SummaryExchange(store.snapshots, publisher.replica, own_summary, show, unix_time=clock)
    await publisher.restore_events(store.read.events_of_replica)
    await order_service.start()
    await publisher.start(lambda: exchange.summaries, scaler.pools)
    exchanging = asyncio.create_task(exchange.run())
    try:
        yield AdminContext(
            directory=directory,
            publisher=publisher,
            order_service=order_service,
            reads=store.read,
            store=store,
            routes=store.routes,
            models=SiteModels(directory, links, store.orders, clock),
        )
    finally:
        publisher.close()
        exchanging.cancel()
        await order_service.close()
        await asyncio.gather(exchanging, *publisher.saving, return_exceptions=True)


def _job_host(config: GatewayConfig, core: Core, store: Store) -> JobHost:
    return JobHost(
        config.database_url,
        config.name,
        core.query_context,
        caller=store.keys.unrevoked,
        refresh_keys=store.keys.refresh,
        unix_time=store.clock,
        side_work=SideWork(),
    )


def _scaling_plan(config: GatewayConfig) -> ScalingPlan:
    try:
        return read_plan(config.scaling) if config.scaling else ScalingPlan()
    except ValueError as exc:
        raise ConfigError(f"scaling: {exc}") from exc


def _tenants_routes(
    backend: Backend, access: Access, batches: Batches, tuning: TuningService
) -> list[HTTPRouteHandler]:
    """Return the routes of files, batches and fine-tuning, for tenants and operators."""
    return [
        *file_routes(backend, batches.files, batches.limits),
        *batch_routes(backend, batches.ledger, batches.limits, batches.runner.wake),
        *message_batch_routes(backend, batches.files, batches.ledger, batches.limits, batches.runner.wake),
        *batch_reads(access, batches.ledger),
        *tuning_routes(backend, tuning),
        *tuning_reads(access, backend, tuning),
    ]


def _backend(config: GatewayConfig, core: Core, store: Store, side_work: SideWork) -> Backend:
    query_context = core.query_context

    def ready() -> Readiness:
        up = [site.name for site in query_context.directory.sites if site.state is SiteState.READY]
        if not up:
            return Readiness(False, "no site is ready to serve")
        away = store.recorder.health.failing_since or core.leases.since_renewed_s > SILENT_S
        # The reason is only logged: it names the database's address, and callers of /ready need no key.
        return Readiness(True, ", ".join(up) + ("; degraded: the database is away" if away else ""))

    return Backend(
        answer=partial(answer, query_context),
        count=TokenCounter(query_context).count,
        models=NamedModels(query_context),
        known_models=NamedModels(query_context, also_away=True),
        fleet_complete=lambda: query_context.fleet_complete,
        routes=query_context.routes,
        authenticate=store.keys.authenticate,
        look_up_key=store.keys.look_up,
        quota_status=query_context.quotas.status,
        ready=ready,
        version=version("mico"),
        clock=query_context.clock,
        unix_time=store.clock,
        bodies=BodyReader(side_work),
        timeout_s=config.answer_within_s,
        body_limit_bytes=config.body_limit_bytes,
        keep_alive_s=config.keep_alive_s,
    )


def _operators_http(config: GatewayConfig, core: Core, backend: Backend) -> HttpServer:
    @get("/metrics")
    async def export() -> Response[bytes]:
        return Response(core.metrics.text(), media_type=CONTENT_TYPE)

    return http_server(
        create_operators_http(backend, [export]),
        host=config.metrics_host,
        port=config.own_metrics_port,
        end_within_s=FAREWELL_S,
        limits=ConnectionLimits(connections=OPERATORS_CONNECTIONS),
        who="operators",
    )


def _http(
    config: GatewayConfig,
    backend: Backend,
    routes: Sequence[HTTPRouteHandler],
    credentials: ListenerCredentials,
) -> HttpServer:
    return http_server(
        create_http(backend, routes),
        host=config.host,
        port=config.http_port,
        reuse_port=config.workers > 1,
        end_within_s=config.drain_s + FAREWELL_S,
        certificate=credentials.http,
    )
