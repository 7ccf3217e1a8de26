"""Keeps which files hold the data, snapshots and adapters of jobs, by their digests."""

from __future__ import annotations

from typing import Any

from sqlalchemy import and_, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.batches.files import expire, keep
from gateway.store.tables import tuning_content, tuning_jobs
from gateway.tuning.rows import content_columns, content_of, job_of
from gateway.tuning.values import (
    UNFINISHED,
    Content,
    Job,
    JobStatus,
    Kind,
    TunedModel,
    model_name,
    tuned_model,
)


class Contents:
    """The content of all jobs, with `checkpoints` of each at most. Methods may raise SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine, checkpoints: int) -> None:
        self._engine = engine
        self._checkpoints = checkpoints

    async def of_job(self, job_id: str, *kinds: Kind) -> list[Content]:
        """Return what is stored of a job, the latest step first."""
        table = tuning_content
        query = select(table).where(table.c.job_id == job_id, table.c.kind.in_(kinds))
        async with self._engine.connect() as connection:
            rows = await connection.execute(query.order_by(table.c.step.desc()))
            return [content_of(row) for row in rows]

    async def find(self, sha256: str) -> Content | None:
        """Return content that is there to be fetched: the files of a job that is over may be deleted."""
        is_needed = or_(tuning_jobs.c.status.in_(UNFINISHED), _IS_MODEL)
        query = select(tuning_content).select_from(_JOIN).where(tuning_content.c.sha256 == sha256, is_needed)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query.limit(1))).first()
        return None if row is None else content_of(row)

    async def add(self, content: Content, run: str) -> list[str] | None:
        """Record what the current run has stored; None if it is current no more.

        Returns the files that it replaces: of earlier snapshots, and of checkpoints above the number kept.
        Those expire, while the file of the content is kept.
        """
        table = tuning_content
        current = and_(
            tuning_jobs.c.id == content.job_id,
            tuning_jobs.c.run == run,
            tuning_jobs.c.status.in_(UNFINISHED),
        )
        async with self._engine.begin() as connection:
            hold = update(tuning_jobs).where(current).values(run=run)  # until this transaction ends
            if not (await connection.execute(hold)).rowcount:
                return None
            alike = select(table).where(table.c.job_id == content.job_id, table.c.kind == content.kind)
            rows = (await connection.execute(alike.order_by(table.c.step.desc()))).all()
            others = [row for row in rows if row.step != content.step]
            kept = self._checkpoints - 1 if content.kind is Kind.CHECKPOINT else 0
            gone = [row for row in rows if row.step == content.step] + others[kept:]
            for row in gone:
                await connection.execute(_delete(content_of(row)))
            await connection.execute(insert(table), content_columns(content))
            await keep(connection, content.file_id, content.bytes)
            replaced = [row.file_id for row in gone if row.file_id != content.file_id]
            await expire(connection, replaced, content.at)
            return replaced

    async def models(self, tenant: str) -> list[tuple[Job, Content]]:
        """Return the adapters of a tenant that may be served, with their jobs."""
        content = [each.label(f"content_{each.name}") for each in tuning_content.c]
        query = select(tuning_jobs, *content).select_from(_JOIN)
        query = query.where(_IS_MODEL, tuning_jobs.c.tenant == tenant)
        async with self._engine.connect() as connection:
            rows = await connection.execute(query.order_by(tuning_content.c.at, tuning_content.c.step))
            return [(job_of(row), content_of(row, "content_")) for row in rows]

    async def tuned(self) -> list[TunedModel]:
        """Return the adapters of jobs that succeeded, of all tenants, and their checkpoints.

        Every replica asks every few seconds: no job is read as a whole.
        """
        job, content = tuning_jobs.c, tuning_content.c
        names = (job.model, job.tenant, job.suffix, job.id, content.kind, content.step)
        query = select(*names, job.key_id, content.sha256, content.bytes).select_from(_JOIN)
        query = query.where(_IS_MODEL, job.status == JobStatus.SUCCEEDED)
        async with self._engine.connect() as connection:
            return [
                TunedModel(
                    model_name(tuned_model(base, tenant, suffix, job_id), kind, step),
                    tenant,
                    key,
                    base,
                    *rest,
                )
                for base, tenant, suffix, job_id, kind, step, key, *rest in await connection.execute(
                    query.order_by(content.at, content.step)
                )
            ]

    async def unfinished(self) -> list[str]:
        """Return the names of what jobs that are not over will have made."""
        job = tuning_jobs.c
        query = select(job.model, job.tenant, job.suffix, job.id).where(job.status.in_(UNFINISHED))
        async with self._engine.connect() as connection:
            return [tuned_model(*row) for row in await connection.execute(query)]

    async def remove(self, content: Content) -> bool:
        """Forget content; its file expires, but for data, whose file is the client's."""
        async with self._engine.begin() as connection:
            if content.kind not in (Kind.DATA, Kind.VALIDATION):
                await expire(connection, [content.file_id], content.at)
            return bool((await connection.execute(_delete(content))).rowcount)

    async def find_leftovers(self, limit: int, checkpoints_before: float) -> list[Content]:
        """Return content of jobs that ended, but what may be served; of that checkpoints of jobs that were
        created before a time.
        """
        old = and_(tuning_content.c.kind == Kind.CHECKPOINT, tuning_jobs.c.created_at < checkpoints_before)
        query = select(tuning_content).select_from(_JOIN)
        query = query.where(tuning_jobs.c.status.not_in(UNFINISHED), or_(~_IS_MODEL, old)).limit(limit)
        async with self._engine.connect() as connection:
            return [content_of(row) for row in await connection.execute(query)]


_JOIN = tuning_content.join(tuning_jobs, tuning_jobs.c.id == tuning_content.c.job_id)
_IS_MODEL = or_(
    tuning_content.c.kind == Kind.CHECKPOINT,
    and_(tuning_content.c.kind == Kind.ADAPTER, tuning_jobs.c.status == JobStatus.SUCCEEDED),
)


def _delete(content: Content) -> Any:
    return delete(tuning_content).where(
        tuning_content.c.job_id == content.job_id,
        tuning_content.c.kind == content.kind,
        tuning_content.c.step == content.step,
    )
