"""Writes the file of results of a job: the figures of its recorded steps, as comma-separated values."""

from __future__ import annotations

from typing import Final

from gateway.batches.files import Files, Page
from gateway.batches.values import File, Purpose
from gateway.tuning.events import Events
from gateway.tuning.values import Job, TuningLimits

_COLUMNS: Final = ("step", "train_loss", "train_mean_token_accuracy", "valid_loss")


async def write_results(job: Job, files: Files, events: Events, limits: TuningLimits) -> File:
    """Return the complete file, which is not visible yet."""
    writer = await files.begin(job.tenant)
    await writer.write((",".join(_COLUMNS) + "\n").encode())
    for event in await events.list_page(job.id, Page(limits.events, newest_first=False)):
        if event.data is not None:
            figures = (str(event.data.get(name, "")) for name in _COLUMNS)
            await writer.write((",".join(figures) + "\n").encode())
    return await writer.complete("step_metrics.csv", Purpose.FINE_TUNE_RESULTS, limits.kept_s)
