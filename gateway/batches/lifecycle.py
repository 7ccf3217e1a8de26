"""Opens and closes everything that batches of one replica consist of: files, ledger, runner, expiry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple
from uuid import uuid4

from gateway.batches.context import BatchContext
from gateway.batches.expiry import expire_for_ever
from gateway.batches.files import Files
from gateway.batches.ledger import LEASE_S, Ledger
from gateway.batches.runner import POLL_S, Runner
from gateway.batches.values import Batch, BatchLimits
from gateway.domain import Caller
from gateway.job_host import JobHost
from gateway.query.answer import answer
from gateway.query.context import QueryContext
from gateway.query.targets import NamedModels, model_of_batch
from gateway.store.database import open_engine
from gateway.tasks import cancel

LIMITS: Final = BatchLimits()
FINISH_WITHIN_S: Final = 10.0
"""Time for the lines that run when a replica ends; those that take longer run again elsewhere."""


class Batches(NamedTuple):
    files: Files
    ledger: Ledger
    runner: Runner
    limits: BatchLimits


@asynccontextmanager
async def open_batches(
    host: JobHost, limits: BatchLimits = LIMITS, *, lease_s: float = LEASE_S, poll_s: float = POLL_S
) -> AsyncIterator[Batches]:
    """Open the files, the ledger and the runner, on database connections of their own.

    A large file thus never delays the lookup of keys or the record of usage.
    """
    engine = open_engine(host.database_url)
    files = Files(engine, host.unix_time)
    ledger = Ledger(engine, f"{host.replica}-{uuid4().hex}", host.unix_time, lease_s)
    query_context = host.query_context
    directory = query_context.directory
    context = BatchContext(
        answer=partial(answer, query_context),
        models=NamedModels(query_context, also_away=True),
        knows_sites=lambda: query_context.fleet_complete and bool(directory.models),
        model_of=partial(_model_of, query_context, host.caller),
        sites=lambda: directory.sites,
        forecast=query_context.forecasts.request_ahead,
        caller=host.caller,
        refresh_keys=host.refresh_keys,
        dispatched=partial(_is_dispatched, query_context),
        files=files,
        ledger=ledger,
        side_work=host.side_work,
        clock=query_context.clock,
        unix_time=host.unix_time,
        limits=limits,
    )
    runner = Runner(context, poll_s)
    runner.start()
    expiring = asyncio.create_task(expire_for_ever(files, ledger, limits.kept_s))
    try:
        yield Batches(files, ledger, runner, limits)
    finally:
        await runner.close(FINISH_WITHIN_S)
        await cancel(expiring)
        await engine.dispose()


def _model_of(context: QueryContext, caller: Callable[[str], Caller | None], batch: Batch) -> str:
    return model_of_batch(batch.model or "", batch.id, caller(batch.key_id), context)


def _is_dispatched(context: QueryContext, query_id: str) -> bool:
    live = context.live_queries
    state = live.get(query_id) or live.get(f"{query_id}-0")
    return state is not None and state.current is not None
