"""Files and batches of one replica, opened and closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from uuid import uuid4

from litestar.handlers import HTTPRouteHandler

from gateway.batches.context import Means
from gateway.batches.expiry import sweep_for_ever
from gateway.batches.files import Files
from gateway.batches.ledger import LEASE_S, Ledger
from gateway.batches.runner import LOOK_EVERY_S, Runner
from gateway.batches.values import BatchLimits
from gateway.domain import Caller
from gateway.http.backend import Backend
from gateway.http.batches import batch_routes
from gateway.http.files import file_routes
from gateway.query.context import Gateway
from gateway.store.database import open_engine

LIMITS: Final = BatchLimits()
FINISH_WITHIN_S: Final = 10.0
"""For the lines that run when a replica ends; those that take longer run again elsewhere."""


class Batches(NamedTuple):
    routes: list[HTTPRouteHandler]
    runner: Runner
    ledger: Ledger


@asynccontextmanager
async def open_batches(
    url: str,
    replica: str,
    *,
    backend: Backend,
    gateway: Gateway,
    caller: Callable[[str], Caller | None],
    limits: BatchLimits = LIMITS,
    lease_s: float = LEASE_S,
    look_every_s: float = LOOK_EVERY_S,
) -> AsyncIterator[Batches]:
    """With connections of its own: a large file never keeps the keys or the record of usage waiting."""
    engine = open_engine(url)
    files = Files(engine, backend.unix_time)
    ledger = Ledger(engine, f"{replica}-{uuid4().hex}", backend.unix_time, lease_s)
    directory = gateway.directory

    def dispatched(query_id: str) -> bool:
        story = gateway.stories.get(query_id) or gateway.stories.get(f"{query_id}-0")
        return story is not None and story.current is not None

    means = Means(
        backend=backend,
        files=files,
        ledger=ledger,
        sites=lambda: directory.sites,
        known_models=lambda: directory.models if gateway.complete else (),
        forecast=gateway.forecasts.ahead,
        caller=caller,
        dispatched=dispatched,
        limits=limits,
    )
    runner = Runner(means, look_every_s)
    runner.start()
    sweeping = asyncio.create_task(sweep_for_ever(files, ledger, limits.kept_s))
    routes = [
        *file_routes(backend, files, limits),
        *batch_routes(backend, ledger, limits, runner.look_now),
    ]
    try:
        yield Batches(routes, runner, ledger)
    finally:
        await runner.close(FINISH_WITHIN_S)
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        await engine.dispose()
