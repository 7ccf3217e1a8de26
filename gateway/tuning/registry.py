"""Finds tuned models by their names: adapters of jobs that succeeded, and checkpoints."""

from __future__ import annotations

from gateway.tuning.contents import Contents
from gateway.tuning.values import Content, Job, model_name


def name_of(job: Job, content: Content) -> str:
    """Return the name by which clients ask for an adapter."""
    return model_name(job.tuned_model, content.kind, content.step)


async def find_model(contents: Contents, tenant: str, name: str) -> Content | None:
    """Return the adapter of a tuned model of the tenant, None if it has none of this name."""
    models = await contents.models(tenant)
    return next((content for job, content in models if name_of(job, content) == name), None)
