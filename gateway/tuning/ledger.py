"""Stores fine-tuning jobs in the database. A replica supervises a job while it holds the job's lease. Only
the current run of a job may change it, and a job ends exactly once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.files import Page, file_of, lock_tenant, page_query, publish
from gateway.batches.values import File, Purpose
from gateway.store.database import database_time, insert_new
from gateway.store.tables import tuning_content, tuning_events, tuning_jobs, usage
from gateway.tuning.events import ERROR, INFO, Events, printable
from gateway.tuning.rows import content_columns, job_columns, job_of, usage_columns
from gateway.tuning.values import (
    UNFINISHED,
    Content,
    Job,
    JobError,
    JobStatus,
    Kind,
    StepFigures,
    TuningLimits,
    before,
)

LEASE_S: Final = 8.0
"""Time after which another replica takes over from one that died: four polls."""
ANYTHING: Final[Mapping[str, str]] = {}
FILTERED_AT_ONCE: Final = 100
"""Jobs read per query when filtering by metadata."""


class UnknownFile(Exception):
    """The tenant has no such file with the purpose 'fine-tune'. `param` is the field that named it."""

    def __init__(self, param: str) -> None:
        super().__init__(param)
        self.param = param


class TooManyJobs(Exception):
    """The tenant has as many unfinished jobs, or tuned models, as it may have."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Progress(NamedTuple):
    """Progress of a run: `steps` are the figures of new steps, in order, to be shown."""

    step: int
    total_steps: int
    trained_tokens: int
    nano_usd: int
    tokens_per_s: float
    revision: str
    steps: Sequence[StepFigures] = ()


class Ledger:
    """The jobs of all tenants. `owner` identifies one process of one replica, `clock` returns unix time, and
    `cloud_of` the cloud of a site.

    Every method may raise SQLAlchemy's errors. Methods that change a job return False if its status does not
    allow the change, or if another replica or another run holds it.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        owner: str,
        clock: Callable[[], float],
        limits: TuningLimits,
        lease_s: float = LEASE_S,
        *,
        cloud_of: Callable[[str], str] = lambda site: "",
    ) -> None:
        self._engine = engine
        self._cloud_of = cloud_of
        self.clock = clock
        self._limits = limits
        self._events = Events(engine, clock, limits.events)
        self.owner = owner
        self.lease_s = lease_s

    # ---- for clients

    async def create(self, job: Job) -> None:
        """Insert a job. Raises UnknownFile or TooManyJobs."""
        async with self._engine.begin() as connection:
            await lock_tenant(connection, job.tenant)
            training = job.training_file_id
            named = {"training_file": training, "validation_file": job.validation_file_id or training}
            for param, file_id in named.items():
                if await connection.scalar(file_of(job.tenant, file_id, Purpose.FINE_TUNE)) is None:
                    raise UnknownFile(param)
            if int(await connection.scalar(_count_unfinished(job.tenant)) or 0) >= self._limits.tenant_jobs:
                raise TooManyJobs(f"{self._limits.tenant_jobs} jobs are not over yet")
            if int(await connection.scalar(_count_models(job.tenant)) or 0) >= self._limits.tenant_models:
                most = self._limits.tenant_models
                raise TooManyJobs(
                    f"{most} jobs have models or checkpoints, or are not over yet: delete those of some"
                )
            await connection.execute(insert(tuning_jobs), job_columns(job))
            await self._events.add(
                connection, job.id, INFO, "The job was created; its files are checked first."
            )

    async def get(self, tenant: str, job_id: str) -> Job | None:
        query = select(tuning_jobs).where(tuning_jobs.c.tenant == tenant, tuning_jobs.c.id == job_id)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else job_of(row)

    async def list_page(
        self, tenant: str | None, page: Page, about: Mapping[str, str] | None = ANYTHING
    ) -> list[Job]:
        """Return the jobs of one page and one more if there are more. `tenant` None: of all tenants.

        `about`: only those whose metadata has these pairs, None: those without metadata. Raises LookupError.
        """
        found = list[Job]()
        conditions = [] if tenant is None else [tuning_jobs.c.tenant == tenant]
        read = page._replace(limit=max(page.limit, FILTERED_AT_ONCE)) if about != ANYTHING else page
        async with self._engine.connect() as connection:
            while True:
                query = await page_query(connection, tuning_jobs, conditions, read)
                jobs = [job_of(row) for row in await connection.execute(query)]
                found += [job for job in jobs if _is_about(job, about)]
                if len(jobs) <= read.limit or len(found) > page.limit:
                    return found[: page.limit + 1]
                read = read._replace(after=jobs[-1].id)

    async def cancel(self, tenant: str, job_id: str) -> bool:
        """End a job as cancelled. Its run is fenced at once; the holder of the lease stops it at the site."""
        values = {"status": JobStatus.CANCELLED, "finished_at": self.clock()}
        return await self._turn(tenant, job_id, before(JobStatus.CANCELLED), values, "The job was cancelled.")

    async def pause(self, tenant: str, job_id: str) -> bool:
        message = "The job was paused: it keeps its last snapshot."
        return await self._turn(
            tenant, job_id, before(JobStatus.PAUSED), {"status": JobStatus.PAUSED}, message
        )

    async def resume(self, tenant: str, job_id: str) -> bool:
        """Queue a paused job. If its files have not been checked, they are checked first."""
        is_checked = tuning_jobs.c.rows > 0
        status = case((is_checked, JobStatus.QUEUED.value), else_=JobStatus.VALIDATING.value)
        return await self._turn(
            tenant, job_id, (JobStatus.PAUSED,), {"status": status}, "The job was resumed."
        )

    async def _turn(
        self, tenant: str, job_id: str, allowed: Sequence[JobStatus], values: dict[str, Any], message: str
    ) -> bool:
        where = and_(
            tuning_jobs.c.tenant == tenant,
            tuning_jobs.c.id == job_id,
            tuning_jobs.c.status.in_(allowed),
        )
        async with self._engine.begin() as connection:
            if not (await connection.execute(update(tuning_jobs).where(where).values(**values))).rowcount:
                return False
            if "finished_at" in values:
                await self._record_usage(connection, job_id, values["status"])
            await self._events.add(connection, job_id, INFO, message)
            return True

    # ---- leases

    async def lease(self, max_jobs: int, served: Collection[str] | None = None) -> list[Job]:
        """Renew this owner's leases and take new ones, oldest job first, up to `max_jobs` in all. Paused jobs
        come last, after queued jobs of models that are not `served`. The leases of the latter are not
        renewed, and for one more lease only replicas whose sites serve the model may take them.

        Return all jobs that this owner now holds.
        """
        async with self._engine.connect() as connection:
            now = await database_time(connection, self.clock)
        table, ends = tuning_jobs, tuning_jobs.c.leased_until
        is_ours = table.c.leased_by == self.owner
        rests = and_(table.c.status == JobStatus.PAUSED, table.c.run.is_(None))
        queued = and_(table.c.status == JobStatus.QUEUED, table.c.run.is_(None))
        siteless = false() if served is None else and_(queued, table.c.model.not_in(served))
        free = or_(
            table.c.leased_by.is_(None),
            ends > now + 2 * self.lease_s,  # the database's clock was set back
            and_(~siteless, or_(is_ours, ends < now)),
            and_(siteless, ends < now - self.lease_s),
        )
        claimable = (
            select(table.c.id)
            .where(table.c.status.in_(UNFINISHED), free)
            .order_by(case((rests, 3), (siteless, 2), (is_ours, 0), else_=1), table.c.created_at, table.c.id)
            .limit(max_jobs)
        )
        async with self._engine.connect() as connection:
            ids = list(await connection.scalars(claimable))
        if not ids:
            return []
        async with self._engine.begin() as connection:
            take = update(table).where(table.c.id.in_(ids), table.c.status.in_(UNFINISHED), free)
            await connection.execute(take.values(leased_by=self.owner, leased_until=now + self.lease_s))
            held = select(table).where(is_ours, table.c.id.in_(ids), table.c.status.in_(UNFINISHED))
            rows = await connection.execute(held.order_by(table.c.created_at, table.c.id))
            return [job_of(row) for row in rows]

    async def release(self) -> None:
        """Return all leases, so that another replica can take over at once."""
        free = update(tuning_jobs).where(tuning_jobs.c.leased_by == self.owner)
        async with self._engine.begin() as connection:
            await connection.execute(free.values(leased_by=None, leased_until=None))

    # ---- by the holder of the lease

    async def validated(self, job: Job, rows: int, contents: Sequence[Content]) -> bool:
        """Queue a job whose files are valid, with their digests."""
        values = {
            "status": JobStatus.QUEUED,
            "rows": rows,
            "total_steps": job.plan.total_steps(rows),
        }
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, (JobStatus.VALIDATING,), values):
                return False
            of_earlier_try = tuning_content.c.job_id == job.id
            await connection.execute(delete(tuning_content).where(of_earlier_try))
            await connection.execute(insert(tuning_content), [content_columns(each) for each in contents])
            await self._events.add(
                connection, job.id, INFO, f"The files are good: {rows} rows. The job waits for a site."
            )
            return True

    async def start(self, job: Job, run: str, site: str) -> bool:
        """Assign the next run to a queued job that has none."""
        values = {"status": JobStatus.RUNNING, "run": run, "site": site, "runs": job.runs + 1}
        no_run = tuning_jobs.c.run.is_(None)
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, (JobStatus.QUEUED,), values, no_run):
                return False
            await self._events.add(connection, job.id, INFO, f"The job runs at {site}.")
            return True

    async def advance(self, job: Job, progress: Progress) -> bool:
        """Write the progress of the current run. Only a step beyond all earlier ones counts as progress."""
        is_current = tuning_jobs.c.run == job.run
        values: dict[str, Any] = {
            "step": progress.step,
            "total_steps": progress.total_steps,
            "trained_tokens": progress.trained_tokens,
            "nano_usd": progress.nano_usd,
            "tokens_per_s": progress.tokens_per_s,
            "revision": progress.revision,
        }
        if progress.step > job.step:
            values["runs"] = 1
        allowed = (JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.QUEUED)
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, allowed, values, is_current):
                return False
            for each in progress.steps:
                await self._events.add_step(connection, job.id, progress.total_steps, each)
            return True

    async def leave_run(self, job: Job, message: str = "", level: str = INFO) -> bool:
        """Drop the current run. A running job is queued again; a paused job stays paused.

        The job keeps its site, which its usage is recorded for if it ends before it runs again.
        """
        status = case(
            (tuning_jobs.c.status == JobStatus.RUNNING.value, JobStatus.QUEUED.value),
            else_=tuning_jobs.c.status,
        )
        values = {"status": status, "run": None, "tokens_per_s": 0.0}
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, UNFINISHED, values, tuning_jobs.c.run == job.run):
                return False
            if message:
                await self._events.add(connection, job.id, level, message)
            return True

    async def end(
        self,
        job: Job,
        status: JobStatus,
        message: str,
        *,
        error: JobError | None = None,
        results: File | None = None,
    ) -> bool:
        """End a job, record its usage, and make the file of its results visible."""
        stored = None if error is None else error._replace(message=printable(error.message))
        values = {
            "status": status,
            "finished_at": self.clock(),
            "error": None if stored is None else list(stored),
            "result_file_id": None if results is None else results.id,
            "tokens_per_s": 0.0,
        }
        same_run = tuning_jobs.c.run.is_(None) if job.run is None else tuning_jobs.c.run == job.run
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, before(status), values, same_run):
                return False
            await self._record_usage(connection, job.id, status)
            if results is not None:
                await publish(connection, results)
            await self._events.add(connection, job.id, INFO if error is None else ERROR, message)
            return True

    async def add_event(
        self, job: Job, level: str, message: str, allowed: Sequence[JobStatus] = UNFINISHED
    ) -> bool:
        """Add an event to a job that this owner holds."""
        async with self._engine.begin() as connection:
            if not await self._change(connection, job.id, allowed, {"leased_by": self.owner}):
                return False
            await self._events.add(connection, job.id, level, message)
            return True

    # ---- by any replica

    async def runs(self) -> dict[str, int]:
        """Return the number of runs by site, over all replicas."""
        query = (
            select(tuning_jobs.c.site, func.count())
            .where(tuning_jobs.c.run.is_not(None), tuning_jobs.c.status.in_(UNFINISHED))
            .group_by(tuning_jobs.c.site)
        )
        async with self._engine.connect() as connection:
            return {row[0]: row[1] for row in await connection.execute(query)}

    async def current_run(self, job_id: str) -> str | None:
        """Return the name of the current run, or None if the job has ended or waits."""
        query = select(tuning_jobs.c.run).where(
            tuning_jobs.c.id == job_id, tuning_jobs.c.status.in_(UNFINISHED)
        )
        async with self._engine.connect() as connection:
            run: str | None = await connection.scalar(query)
            return run

    async def remove_expired(self, limit: int) -> int:
        """Remove jobs, with their events, that ended long ago and have no content left."""
        content = exists().where(tuning_content.c.job_id == tuning_jobs.c.id)
        old = select(tuning_jobs.c.id).where(
            tuning_jobs.c.status.not_in(UNFINISHED),
            tuning_jobs.c.created_at < self.clock() - self._limits.kept_s,
            ~content,
        )
        async with self._engine.connect() as connection:
            ids = list(await connection.scalars(old.limit(limit)))
        if not ids:
            return 0
        async with self._engine.begin() as connection:
            await connection.execute(delete(tuning_events).where(tuning_events.c.job_id.in_(ids)))
            await connection.execute(delete(tuning_jobs).where(tuning_jobs.c.id.in_(ids)))
        return len(ids)

    # ---- within a transaction

    async def _change(
        self,
        connection: AsyncConnection,
        job_id: str,
        allowed: Sequence[JobStatus],
        values: dict[str, Any],
        *more: ColumnElement[bool],
    ) -> bool:
        is_ours = and_(
            tuning_jobs.c.id == job_id,
            tuning_jobs.c.leased_by == self.owner,
            tuning_jobs.c.status.in_(allowed),
            *more,
        )
        return bool((await connection.execute(update(tuning_jobs).where(is_ours).values(**values))).rowcount)

    async def _record_usage(self, connection: AsyncConnection, job_id: str, status: JobStatus) -> None:
        """Record the trained tokens of an ending job, if any, as one row of usage."""
        row = (await connection.execute(select(tuning_jobs).where(tuning_jobs.c.id == job_id))).one()
        job = job_of(row)
        if job.trained_tokens:
            columns = usage_columns(job, status, self.clock(), self._cloud_of(job.site))
            await connection.execute(insert_new(connection.dialect.name, usage), columns)


def new_job_id() -> str:
    return "ftjob-" + secrets.token_hex(12)


def new_run() -> str:
    """Return an unguessable name for a run."""
    return secrets.token_hex(16)


def _is_about(job: Job, about: Mapping[str, str] | None) -> bool:
    return not job.about if about is None else about.items() <= (job.about or {}).items()


def _count_unfinished(tenant: str) -> Select[Any]:
    unfinished = and_(tuning_jobs.c.tenant == tenant, tuning_jobs.c.status.in_(UNFINISHED))
    return select(func.count()).select_from(tuning_jobs).where(unfinished)


def _count_models(tenant: str) -> Select[Any]:
    """Count the jobs that have a model or checkpoints, or may still get them."""
    is_model = tuning_content.c.kind.in_((Kind.ADAPTER, Kind.CHECKPOINT))
    has_model = exists().where(tuning_content.c.job_id == tuning_jobs.c.id, is_model)
    counted = and_(tuning_jobs.c.tenant == tenant, or_(tuning_jobs.c.status.in_(UNFINISHED), has_model))
    return select(func.count()).select_from(tuning_jobs).where(counted)
