"""Finds tuned models by their names: adapters of jobs that succeeded, and checkpoints."""

from __future__ import annotations

from gateway.domain import Caller
from gateway.tuning.contents import Contents
from gateway.tuning.values import Content, Job, model_name


def name_of(job: Job, content: Content) -> str:
    """Return the name by which clients ask for an adapter."""
    return model_name(job.tuned_model, content.kind, content.step)


def may_use(caller: Caller, job: Job, content: Content) -> bool:
    """Return whether a key of the job's tenant may use what it trained: by its name, or by the base's."""
    return caller.may_use(name_of(job, content)) or caller.may_use(job.model)


async def find_model(contents: Contents, caller: Caller, name: str) -> Content | None:
    """Return the adapter of a tuned model that the caller may use, None if there is none of this name."""
    for job, content in await contents.models(caller.tenant):
        if name_of(job, content) == name and may_use(caller, job, content):
            return content
    return None
