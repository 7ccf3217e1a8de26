"""One run of a job at a site: the order that begins it, and what its reports mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from gateway.domain import Site
from gateway.federation.training import RunReport
from gateway.tuning.ledger import Progress
from gateway.tuning.placing import End
from gateway.tuning.values import Content, Job, Kind, StepFigures, TuningLimits
from wire import federation_pb2 as pb

NANO_USD_PER_TOKEN: Final = 1_000
"""Nano-dollars of a token at a price of one dollar per million."""
_ENDS: Final = {
    pb.Training.SUCCEEDED: End.SUCCEEDED,
    pb.Training.FAILED: End.FAILED,
    pb.Training.STOPPED: End.STOPPED,
    pb.Training.GIVEN_UP: End.GIVEN_UP,
}


def order_of(job: Job, contents: Sequence[Content]) -> pb.Train:
    """Return the order for the current run. `contents`: data, validation, and the last snapshot if there is
    one.
    """
    plan = job.plan
    order = pb.Train(
        job_id=job.id,
        run=job.run or "",
        tenant=job.tenant,
        model=job.model,
        tuned_model=job.tuned_model,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        rank=plan.rank,
        alpha=plan.alpha,
        target=plan.target,
        seed=plan.seed,
        revision=job.revision,
    )
    fields = {Kind.DATA: order.data, Kind.VALIDATION: order.validation, Kind.SNAPSHOT: order.snapshot}
    for content in contents:
        field = fields[content.kind]
        field.sha256, field.bytes = bytes.fromhex(content.sha256), content.bytes
    return order


def end_of(report: RunReport) -> End | None:
    """Return how the run ended, None while it runs. An end that only newer sites know is one given up."""
    return None if report.end == pb.Training.RUNNING else _ENDS.get(report.end, End.GIVEN_UP)


def progress_of(job: Job, report: RunReport, site: Site | None, limits: TuningLimits) -> Progress:
    """Return what a report adds to a job: steps and tokens that it has already are not counted again."""
    total = report.total_steps or job.total_steps
    every = max(1, ceil(total / limits.metrics))
    fresh = [
        StepFigures(*each)
        for each in report.steps
        if job.step < each.step <= report.step
        and (each.step % every == 0 or each.step in (1, total) or each.validation_loss is not None)
    ]
    trained = max(0, report.trained_tokens - job.trained_tokens)
    trains = None if site is None else site.identity.trains
    price = 0.0 if trains is None else trains.usd_per_mtok
    return Progress(
        max(job.step, report.step),
        total,
        job.trained_tokens + trained,
        job.nano_usd + round(trained * price * NANO_USD_PER_TOKEN),
        report.tokens_per_s,
        job.revision or (report.revision if report.step else ""),
        sorted(fresh, key=lambda each: each.step),
    )


def advanced(job: Job, progress: Progress) -> Job:
    """Return the job as it is once the progress is written, so that it is counted once if no read follows."""
    return replace(
        job,
        step=progress.step,
        total_steps=progress.total_steps,
        trained_tokens=progress.trained_tokens,
        nano_usd=progress.nano_usd,
        revision=progress.revision,
    )
