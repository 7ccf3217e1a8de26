"""Compose the parts that answer queries: the links to sites, forecasts, quotas, routes and observers.

Independent of where queries come from: `app.py` adds HTTP, batches, fine-tuning and the operators' API.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gateway.config import ConfigError, GatewayConfig
from gateway.domain import SHADOW_TENANT
from gateway.federation.directory import Directory
from gateway.federation.server import Federation, FederationSettings, Listening, listen
from gateway.listeners import ListenerCredentials
from gateway.outcome import Outcome
from gateway.query.context import QueryContext
from gateway.query.forecasting import ForecastService
from gateway.query.shadows import Shadows
from gateway.quotas.leases import Leases
from gateway.quotas.limits import WhenAway
from gateway.routing.model_routes import ModelRoute
from gateway.store.model_routes import read_file
from gateway.store.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.publisher import SnapshotPublisher
from predictor.errors import ArtifactError
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Forecaster
from predictor.outcome_log import OutcomeLog

if TYPE_CHECKING:
    from gateway.telemetry.traces import Traces

log = logging.getLogger(__name__)

REJOIN_S = 15.0
"""Seconds in which every site dials again: slightly more than a site's longest pause between two dials."""


class Core(NamedTuple):
    """The parts that answer queries, and those that observe every outcome."""

    query_context: QueryContext
    metrics: Metrics
    publisher: SnapshotPublisher
    leases: Leases


@asynccontextmanager
async def open_core(
    config: GatewayConfig, store: Store, credentials: ListenerCredentials, traces: Traces | None
) -> AsyncIterator[Core]:
    """Start the parts. At the end, wait until every query that has ended is recorded."""
    directory, clock = Directory(), asyncio.get_running_loop().time
    federation = _federation(config, directory, clock, credentials, lambda: leases.replicas)
    forecasts = _start_forecasts(config, directory, lambda: federation.loop_is_busy)
    metrics = Metrics(directory, lambda: query_context.live)
    metrics.register(forecasts)
    publisher = _publisher(config, store, directory, clock)
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
        turns=itertools.count(secrets.randbelow(1 << 32)),  # so that replicas draw differently
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


def _federation(
    config: GatewayConfig,
    directory: Directory,
    clock: Callable[[], float],
    credentials: ListenerCredentials,
    replicas: Callable[[], tuple[str, ...]],
) -> Federation:
    settings = FederationSettings(
        config.name,
        config.tokens(),
        config.peers,
        config.heartbeat_s,
        stream_interval_s=config.stream_interval_s,
        worker_ports=config.worker_ports(config.grpc_port),
        mutual_worker_ports=config.worker_ports(config.mtls_port),
    )
    return Federation(settings, directory, clock, credentials.certificates, replicas=replicas)


def _publisher(
    config: GatewayConfig, store: Store, directory: Directory, clock: Callable[[], float]
) -> SnapshotPublisher:
    return SnapshotPublisher(
        directory,
        config.name,
        clock=clock,
        unix_time=store.clock,
        history_store=store.snapshots,
        certificate_until=store.certificates.expires_at,
        store_event=partial(store.recorder.record_event, replica=config.name),
        mark_paid=store.hours.mark,
    )


def _start_forecasts(
    config: GatewayConfig, directory: Directory, loop_is_busy: Callable[[], bool]
) -> ForecastService:
    histogram = HistogramForecaster()
    forecasts = ForecastService(
        _forecaster(config, histogram),
        histogram,
        outcome_log=_outcome_log(config),
        parent_of=directory.parent_of,
        loop_is_busy=loop_is_busy,
    )
    forecasts.start()
    return forecasts


def _outcome_recorder(
    store: Store,
    directory: Directory,
    forecasts: ForecastService,
    observers: Sequence[Callable[[Outcome], None]],
) -> Callable[[Outcome], None]:
    """Return the function that records each outcome. Observers do not get the outcomes of shadow copies."""

    def record(outcome: Outcome) -> None:
        """Record the outcome before the answer's end is sent. Observers run later, so that their errors can't
        prevent the record.
        """
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
    """Start the gRPC server for sites. Raises ConfigError if it cannot listen."""
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
    """Load the forecaster, or return the histogram of past answers if no artifact can be loaded."""
    try:
        return HotReloadForecaster(config.predictor)
    except ArtifactError:
        log.exception("no forecaster could be loaded; forecasts come from %s", histogram.name)
        return histogram
