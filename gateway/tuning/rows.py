"""Converts jobs of fine-tuning, and what is stored of them, to rows of the database and back."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlalchemy import Row

from gateway.tuning.values import Content, Job, JobError, JobStatus, Kind, Plan

TRAINED: Final = " (training)"
"""Follows the name of the base in the record of usage."""


def job_columns(job: Job) -> dict[str, Any]:
    columns = {name: getattr(job, name) for name in Job.__slots__}
    error = None if job.error is None else list(job.error)
    return columns | {"plan": msgspec.to_builtins(job.plan), "error": error}


def job_of(row: Row[Any]) -> Job:
    columns = row._mapping
    fields = {name: columns[name] for name in Job.__slots__}
    fields["plan"] = msgspec.convert(fields["plan"], Plan)
    fields["status"] = JobStatus(fields["status"])
    fields["error"] = None if fields["error"] is None else JobError(*fields["error"])
    return Job(**fields)


def content_columns(content: Content) -> dict[str, Any]:
    return {name: getattr(content, name) for name in Content.__slots__}


def content_of(row: Row[Any], prefix: str = "") -> Content:
    """Convert a row whose columns are called as those of the table after `prefix`."""
    columns = row._mapping
    fields = {name: columns[prefix + name] for name in Content.__slots__}
    return Content(**(fields | {"kind": Kind(fields["kind"])}))


def usage_columns(job: Job, status: JobStatus, now: float, cloud: str) -> dict[str, Any]:
    """Return the row of usage of a job that ends `now`: its trained tokens, charged in that month. It counts
    whole at its last site, which is in `cloud`.
    """
    return {
        "query_id": job.id,
        "request_id": job.id,
        "received_at": now,
        "tenant": job.tenant,
        "key_id": job.key_id,
        "model": job.model + TRAINED,
        "status": "answered" if status is JobStatus.SUCCEEDED else status.value,
        "error": "" if job.error is None else job.error.message[:500],
        "site": job.site,
        "cloud": cloud,
        "attempts": max(1, job.runs),
        "prompt_tokens": job.trained_tokens,
        "completion_tokens": 0,
        "total_s": max(0.0, now - job.created_at),
        "nano_usd": job.nano_usd,
        "cheapest_nano_usd": job.nano_usd,
        "dearest_nano_usd": job.nano_usd,
    }
