"""Opens and closes everything that fine-tuning of one replica consists of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.batches.files import Files
from gateway.domain import Caller, Site
from gateway.errors import BadRequest, MicoError
from gateway.job_host import JobHost
from gateway.query.refusals import region_error
from gateway.store.database import open_engine
from gateway.tuning.contents import Contents
from gateway.tuning.context import TuningContext
from gateway.tuning.events import Events
from gateway.tuning.ledger import LEASE_S, Ledger
from gateway.tuning.placing import refusal
from gateway.tuning.runner import POLL_S, TICK_S, Runner
from gateway.tuning.service import TuningService
from gateway.tuning.storing import ContentStore
from gateway.tuning.values import Plan, TuningLimits

LIMITS: Final = TuningLimits()


class Tuning(NamedTuple):
    service: TuningService
    runner: Runner


@asynccontextmanager
async def open_tuning(
    host: JobHost,
    limits: TuningLimits = LIMITS,
    *,
    lease_s: float = LEASE_S,
    poll_s: float = POLL_S,
    tick_s: float = TICK_S,
) -> AsyncIterator[Tuning]:
    """Open the ledger, the content store and the runner, on database connections of their own."""
    engine, query_context = open_engine(host.database_url), host.query_context
    owner, cloud_of = f"{host.replica}-{uuid4().hex}", query_context.directory.cloud_of
    ledger = Ledger(engine, owner, host.unix_time, limits, lease_s, cloud_of=cloud_of)
    context = _context(engine, ledger, host, limits)
    runner = Runner(context, poll_s, tick_s)
    service = TuningService(
        ledger=ledger,
        events=context.events,
        contents=context.contents,
        served=lambda: query_context.directory.served,
        refusal=lambda caller, model, plan: _refusal(caller, model, plan, context.sites()),
        remove=context.store.remove,
        wake=runner.wake,
        limits=limits,
    )
    query_context.federation.bulk = context.store
    runner.start()
    try:
        yield Tuning(service, runner)
    finally:
        query_context.federation.bulk = None
        await runner.close()
        await engine.dispose()


def _refusal(caller: Caller, model: str, plan: Plan, sites: Sequence[Site]) -> MicoError | None:
    """Return the error for a job that no site in the regions of its key could train now."""
    if (error := region_error(caller, model, sites)) is not None:
        return error
    if (why := refusal(caller.sites_of(sites), model, plan)) is None:
        return None
    where = "" if caller.regions is None else " in the regions of this key"
    return BadRequest(f"The job was not accepted{where}: {why}.", param="model", code="model_not_trainable")


def _context(engine: AsyncEngine, ledger: Ledger, host: JobHost, limits: TuningLimits) -> TuningContext:
    directory, federation = host.query_context.directory, host.query_context.federation
    files, contents = Files(engine, host.unix_time), Contents(engine, limits.checkpoints)
    return TuningContext(
        ledger=ledger,
        events=Events(engine, host.unix_time, limits.events),
        contents=contents,
        store=ContentStore(files, ledger, contents, limits, host.unix_time),
        files=files,
        sites=lambda: directory.sites,
        links=lambda: federation.links,
        forget_model=directory.forget_model,
        caller=host.caller,
        refresh_keys=host.refresh_keys,
        charge=host.query_context.quotas.charge,
        side_work=host.side_work,
        clock=host.query_context.clock,
        unix_time=host.unix_time,
        limits=limits,
    )
