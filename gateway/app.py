"""Compose one gateway process: start its parts in order and end them in the reverse order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

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
from gateway.domain import SHADOW_TENANT, Outcome, SiteState
from gateway.federation.directory import Directory
from gateway.federation.server import Federation, FederationSettings, Listening, listen
from gateway.http.app import create_http, create_operators_http
from gateway.http.backend import Backend, Readiness
from gateway.http.batches import batch_routes
from gateway.http.body import BodyReader
from gateway.http.files import file_routes
from gateway.http.fine_tuning import tuning_routes
from gateway.http.message_batches import message_batch_routes
from gateway.http.server import ConnectionLimits, HttpServer, http_server
from gateway.listeners import ListenerCredentials, load_credentials
from gateway.process_settings import set_up_collector, set_up_process
from gateway.query.answer import answer
from gateway.query.context import QueryContext
from gateway.query.counting import TokenCounter
from gateway.query.forecasting import ForecastService
from gateway.query.shadows import Shadows
from gateway.query.targets import NamedModels
from gateway.quotas.leases import Leases
from gateway.quotas.limits import WhenAway
from gateway.routing.model_routes import ModelRoute
from gateway.scaling.plan import ScalingPlan, read_plan
from gateway.scaling.scaler import scaling
from gateway.side_work import SideWork
from gateway.signals import stop_event
from gateway.store.model_routes import read_file
from gateway.store.recorder_metrics import RecorderMetrics
from gateway.store.store import Store, open_store
from gateway.telemetry import logs
from gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.replicas import SummaryExchange
from gateway.tuning.lifecycle import open_tuning
from gateway.tuning.service import TuningService
from predictor.errors import ArtifactError
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Forecaster
from predictor.outcome_log import OutcomeLog

if TYPE_CHECKING:
    from gateway.telemetry.traces import Traces

log = logging.getLogger(__name__)

REJOIN_S = 15.0
"""By then every site has dialled again: the longest pause of a site between two tries, and a little more."""
FAREWELL_S = 2.0
"""Time for clients to receive the error that ends their answers, once the time to drain is up."""
OPERATORS_CONNECTIONS = 100
SILENT_S = 2.0
"""After this long a silence of the database, the readiness answer says that it is away."""


class Core(NamedTuple):
    """The parts that answer queries, and those that observe every outcome."""

    query_context: QueryContext
    metrics: Metrics
    publisher: SnapshotPublisher
    leases: Leases


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, drain queries in flight for at most `drain_s`; return the exit code."""
    logs.configure(config.log_level)
    set_up_process()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(config))
    code: int = uvloop.run(serve(config))
    return code


async def serve(config: GatewayConfig) -> int:
    """Serve until a stop signal; return the exit code: 1 if the server for clients never started, else 0."""
    stop = stop_event()
    pepper = config.key_pepper or None
    async with (
        open_store(
            config.database_url, config.folder, name=config.name, pepper=pepper, journal=config.worker
        ) as store,
        _traces(config) as traces,
        _core(
            config, store, credentials := await load_credentials(config, store.certificates), traces
        ) as core,
        scaling(
            lambda: core.query_context.directory.sites, _scaling_plan(config), core.query_context.clock
        ) as scaler,
        _admin(core, store) as admin,
        open_batches(
            config.database_url,
            config.name,
            query_context=core.query_context,
            caller=store.keys.unrevoked,
            refresh_keys=store.keys.refresh,
            unix_time=store.clock,
            side_work=(side_work := SideWork()),
        ) as batches,
        open_tuning(
            config.database_url,
            config.name,
            query_context=core.query_context,
            caller=store.keys.unrevoked,
            refresh_keys=store.keys.refresh,
            unix_time=store.clock,
        ) as tuning,
    ):
        core.metrics.register(scaler)
        core.metrics.register(RecorderMetrics(store.recorder))
        core.publisher.pools = scaler.pools
        backend = _backend(config, core, store, side_work)
        routes = [*admin_routes(backend, admin), *_tenants_routes(backend, admin, batches, tuning.service)]
        server = _http(config, backend, routes, credentials)
        operators_server = _operators_http(config, core, backend)
        set_up_collector()
        serving = asyncio.create_task(server.serve())
        serving_operators = asyncio.create_task(operators_server.serve())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, serving_operators, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            log.info("draining %d queries for at most %.0f s", core.query_context.live, config.drain_s)
            core.publisher.close()  # or listening pages would keep the server from ending
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
async def _core(
    config: GatewayConfig, store: Store, credentials: ListenerCredentials, traces: Traces | None
) -> AsyncIterator[Core]:
    directory, clock = Directory(), asyncio.get_running_loop().time
    federation = Federation(
        _federation_settings(config),
        directory,
        clock,
        credentials.certificates,
        replicas=lambda: leases.replicas,
    )
    forecasts = _start_forecasts(config, directory)
    metrics = Metrics(directory, lambda: query_context.live)
    metrics.register(forecasts)
    publisher = SnapshotPublisher(
        directory, config.name, clock=clock, unix_time=store.clock, history_store=store.snapshots
    )
    leases = await _start_leases_and_routes(config, store)
    observers = [metrics.observe, publisher.observe, *([] if traces is None else [traces.observe])]
    query_context = QueryContext(
        directory,
        federation,
        forecasts,
        _outcome_recorder(store, directory, forecasts, observers),
        has_room=lambda: store.recorder.has_room,
        policy_name=config.policy,
        max_live=config.most_live,
        max_tries=config.most_tries,
        clock=clock,
        wall_clock=store.clock,
        turns=itertools.count(secrets.randbelow(1 << 32)),  # replicas draw differently
        quotas=leases.quotas,
        lease_more=leases.lease_more,
        routes=lambda: store.routes.current,
        fleet_complete_s=clock() + REJOIN_S,
    )
    shadows = _shadows(query_context, metrics, publisher)
    if traces is not None:
        query_context.trace_query = traces.inject
    listening = await _listen(config, federation, credentials)
    watching = asyncio.create_task(federation.watch_progress())
    try:
        yield Core(query_context, metrics, publisher, leases)
    finally:
        watching.cancel()
        await shadows.close()
        await listening.server.stop(grace=1.0)
        await query_context.wait_settled()
        await leases.close()
        await forecasts.close()


def _federation_settings(config: GatewayConfig) -> FederationSettings:
    return FederationSettings(
        config.name,
        config.tokens(),
        config.peers,
        config.heartbeat_s,
        stream_interval_s=config.stream_interval_s,
        worker_ports=config.worker_ports(config.grpc_port),
        mutual_worker_ports=config.worker_ports(config.mtls_port),
    )


def _start_forecasts(config: GatewayConfig, directory: Directory) -> ForecastService:
    histogram = HistogramForecaster()
    forecasts = ForecastService(
        _forecaster(config, histogram),
        histogram,
        outcome_log=_outcome_log(config),
        parent_of=directory.parent_of,
    )
    forecasts.start()
    return forecasts


def _outcome_recorder(
    store: Store,
    directory: Directory,
    forecasts: ForecastService,
    observers: Sequence[Callable[[Outcome], None]],
) -> Callable[[Outcome], None]:
    """Return the function that records each outcome. Of shadows `forecasts` alone is told."""

    def record(outcome: Outcome) -> None:
        """Record usage before the answer's end is sent; observers run later and can cost no record."""
        store.recorder.record(outcome, directory.cloud_of(outcome.site))
        asyncio.get_running_loop().call_soon(observe, outcome)

    def observe(outcome: Outcome) -> None:
        if outcome.tenant != SHADOW_TENANT:
            for each in observers:
                each(outcome)
        forecasts.observe(outcome)

    return record


async def _listen(
    config: GatewayConfig, federation: Federation, credentials: ListenerCredentials
) -> Listening:
    """Start the server that sites join. Raises ConfigError if it cannot listen."""
    address = f"{config.grpc_host}:{config.grpc_port}"
    try:
        listening = await listen(federation, address, credentials.link, credentials.mutual)
    except RuntimeError as exc:
        where = address if credentials.mutual is None else f"{address} and {credentials.mutual[0]}"
        raise ConfigError(f"sites can't join at {where}: taken, or not of this machine") from exc
    log.info("sites join at %s:%d", config.grpc_host, listening.port)
    if listening.mutual_port is not None:
        log.info("sites with a certificate join at %s:%d", config.grpc_host, listening.mutual_port)
    return listening


@asynccontextmanager
async def _traces(config: GatewayConfig) -> AsyncIterator[Traces | None]:
    """Yield None, and import nothing, unless a collector is configured."""
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
async def _admin(core: Core, store: Store) -> AsyncIterator[AdminContext]:
    """Run the parts behind the operator's API: publisher, orders and the replicas' exchange."""
    query_context, publisher = core.query_context, core.publisher
    directory, links, clock = query_context.directory, query_context.federation.links, store.clock
    order_service = OrderService(store.orders, directory, links, publisher, unix_time=clock)
    own_summary, show = (lambda: publisher.own_summary), publisher.events.add
    exchange = SummaryExchange(store.snapshots, publisher.replica, own_summary, show, unix_time=clock)
    publisher.replica_summaries = lambda: exchange.summaries
    publisher.certificate_until = store.certificates.expires_at
    publisher.mark_paid = store.hours.mark
    publisher.store_event = partial(store.recorder.record_event, replica=publisher.replica)
    await publisher.restore_events(store.read.events_of_replica)
    await order_service.start()
    await publisher.start()
    exchanging = asyncio.create_task(exchange.run())
    try:
        yield AdminContext(
            directory=directory,
            publisher=publisher,
            order_service=order_service,
            reads=store.read,
            still_valid=store.keys.still_valid,
            session_key=store.keys.session_key,
            ended_sessions=store.ended_sessions,
            store=store,
            routes=store.routes,
            models=SiteModels(directory, links, store.orders, clock),
        )
    finally:
        publisher.close()
        exchanging.cancel()
        await order_service.close()
        await asyncio.gather(exchanging, *publisher.saving, return_exceptions=True)


def _scaling_plan(config: GatewayConfig) -> ScalingPlan:
    try:
        return read_plan(config.scaling) if config.scaling else ScalingPlan()
    except ValueError as exc:
        raise ConfigError(f"scaling: {exc}") from exc


def _shadows(query_context: QueryContext, metrics: Metrics, publisher: SnapshotPublisher) -> Shadows:
    figures = publisher.route_figures
    figures.routes = query_context.routes
    metrics.register(figures)
    shadows = Shadows(query_context, figures.observe_copy)
    query_context.ended = shadows.ended
    return shadows


async def _start_leases_and_routes(config: GatewayConfig, store: Store) -> Leases:
    await store.routes.start(_routes_of_file(config))
    leases = Leases(store.slices, WhenAway(config.quotas_when_away), unix_time=store.clock)
    await leases.start()
    return leases


def _routes_of_file(config: GatewayConfig) -> list[ModelRoute]:
    try:
        return read_file(config.routes) if config.routes else []
    except ValueError as exc:
        raise ConfigError(f"routes: {exc}") from exc


def _outcome_log(config: GatewayConfig) -> OutcomeLog | None:
    try:
        return OutcomeLog(config.outcomes) if config.outcomes else None
    except OSError as exc:
        raise ConfigError(f"outcomes can't be kept: {exc}") from exc


def _forecaster(config: GatewayConfig, histogram: HistogramForecaster) -> Forecaster:
    """Load the forecaster; without a usable model return the histogram of past answers."""
    try:
        return HotReloadForecaster(config.predictor)
    except ArtifactError:
        log.exception("no forecaster could be loaded; forecasts come from %s", histogram.name)
        return histogram


def _tenants_routes(
    backend: Backend, admin: AdminContext, batches: Batches, tuning: TuningService
) -> list[HTTPRouteHandler]:
    """Return the routes of files, batches and fine-tuning, of tenants and of the operator."""
    access = Access(backend, admin.still_valid, admin.session_key, admin.ended_sessions)
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
        # The log says why: whoever asks here has no key, and the reason names the database's address.
        return Readiness(True, ", ".join(up) + ("; degraded: the database is away" if away else ""))

    return Backend(
        answer=partial(answer, query_context),
        count=TokenCounter(query_context).count,
        models=NamedModels(query_context),
        known_models=NamedModels(query_context, also_away=True),
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
