"""Defines the values of fine-tuning: jobs, plans, events, stored content and limits. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from gateway.batches.values import DAY_S, MIB

BASE_LEARNING_RATE: Final = 2e-4
"""That `learning_rate_multiplier` multiplies."""


class JobStatus(StrEnum):
    """OpenAI's statuses, and `paused`, which its clients know as `queued`."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_NEXT: Final[Mapping[JobStatus, frozenset[JobStatus]]] = {
    JobStatus.VALIDATING: frozenset(
        (JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.FAILED, JobStatus.CANCELLED)
    ),
    JobStatus.QUEUED: frozenset(
        (
            JobStatus.RUNNING,
            JobStatus.PAUSED,
            JobStatus.SUCCEEDED,  # it was paused and resumed as its run came to the end
            JobStatus.FAILED,
            JobStatus.CANCELLED,
        )
    ),
    JobStatus.RUNNING: frozenset(
        (
            JobStatus.QUEUED,  # its site was lost or gave up: it goes on elsewhere
            JobStatus.PAUSED,
            JobStatus.SUCCEEDED,
            JobStatus.FAILED,
            JobStatus.CANCELLED,
        )
    ),
    JobStatus.PAUSED: frozenset(
        (
            JobStatus.VALIDATING,  # its files were not checked to the end
            JobStatus.QUEUED,
            JobStatus.SUCCEEDED,  # its run came to the end before it had stopped
            JobStatus.FAILED,
            JobStatus.CANCELLED,
        )
    ),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
UNFINISHED: Final = tuple(status for status, after in _NEXT.items() if after)


def may_become(before: JobStatus, after: JobStatus) -> bool:
    return after in _NEXT[before]


def before(after: JobStatus) -> tuple[JobStatus, ...]:
    """Return the statuses from which a job may come to `after`."""
    return tuple(each for each in JobStatus if may_become(each, after))


class Target(StrEnum):
    """The layers that get an adapter."""

    ALL_LINEAR = "all-linear"
    ATTENTION = "attention"


class Plan(msgspec.Struct, frozen=True):
    """What to train. `batch_size` counts rows of one optimizer step."""

    epochs: int = 3
    batch_size: int = 16
    learning_rate_multiplier: float = 1.0
    rank: int = 16
    alpha: float = 32.0
    target: Target = Target.ALL_LINEAR
    seed: int = 0

    @property
    def learning_rate(self) -> float:
        return BASE_LEARNING_RATE * self.learning_rate_multiplier

    def total_steps(self, rows: int) -> int:
        return self.epochs * -(-rows // self.batch_size)


class JobError(NamedTuple):
    """Why a job failed. `param` is the field of the request to blame, if one is."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """`run` is the name of the current run at a site, which fences: what comes of another is dropped.

    `site` has the current run, or had the last. `runs` counts those since the last step of progress.
    `trained_tokens` and their cost, `nano_usd`, never decrease. Times are unix seconds.
    """

    id: str
    tenant: str
    key_id: str
    model: str
    training_file_id: str
    created_at: float
    plan: Plan
    suffix: str = ""
    validation_file_id: str | None = None
    about: Mapping[str, str] | None = None
    status: JobStatus = JobStatus.VALIDATING
    finished_at: float | None = None
    error: JobError | None = None
    rows: int = 0
    revision: str = ""
    run: str | None = None
    runs: int = 0
    site: str = ""
    step: int = 0
    total_steps: int = 0
    trained_tokens: int = 0
    nano_usd: int = 0
    tokens_per_s: float = 0.0
    result_file_id: str | None = None
    leased_by: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in UNFINISHED

    def estimate_finish(self, now_s: float) -> float | None:
        """Return the time at which it ends at the speed of its run; None while that is not known."""
        if self.status is not JobStatus.RUNNING or self.step == 0 or self.tokens_per_s <= 0.0:
            return None
        left_tokens = self.trained_tokens / self.step * (self.total_steps - self.step)
        return now_s + left_tokens / self.tokens_per_s

    @property
    def tuned_model(self) -> str:
        """Return the name of the adapter that it makes."""
        return tuned_model(self.model, self.tenant, self.suffix, self.id)


def tuned_model(base: str, tenant: str, suffix: str, job_id: str) -> str:
    return ":".join(("ft", base, tenant, suffix, job_id.removeprefix("ftjob-")[:8]))


def checkpoint_model(tuned_model: str, step: int) -> str:
    return f"{tuned_model}:ckpt-step-{step}"


@dataclass(frozen=True, slots=True)
class Event:
    """`number` counts from 1 within the job. `data` has the figures of a step."""

    number: int
    at: float
    level: str
    message: str
    data: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """`loss` is the mean of the completion tokens, `accuracy` the share of them that was the likeliest."""

    step: int
    loss: float
    accuracy: float
    validation_loss: float | None = None


class Kind(StrEnum):
    DATA = "data"
    VALIDATION = "validation"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"


def model_name(tuned_model: str, kind: Kind, step: int) -> str:
    """Return the name by which clients ask for an adapter of the job that makes `tuned_model`."""
    return checkpoint_model(tuned_model, step) if kind == Kind.CHECKPOINT else tuned_model


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a job, in the file `file_id`; `sha256` is hexadecimal."""

    job_id: str
    kind: Kind
    step: int
    sha256: str
    bytes: int
    file_id: str
    at: float


class TunedModel(NamedTuple):
    """An adapter that may be asked by its name, and its content. `key_id` is the key that had it trained."""

    name: str
    tenant: str
    key_id: str
    base: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TuningLimits:
    """`runs`: runs without a step of progress between them, after which a job fails. The newest `events` of a
    job are kept; about `metrics` of its steps are among them.

    A site of which nothing was heard for `lost_s` has lost its run, and so has one whose link ended and was
    not back after `unlinked_s`, twice the longest that a site waits before it dials again. A job for which no
    site is there waits `queued_s` at most. A run that trains no step for `starved_s` moves to an idler site.
    """

    rows: int = 50_000
    total_steps: int = 100_000
    tenant_jobs: int = 10
    tenant_models: int = 32
    replica_jobs: int = 64
    runs: int = 5
    events: int = 5_000
    metrics: int = 1_000
    checkpoints: int = 3
    content_bytes: int = 4_096 * MIB
    lost_s: float = 15.0
    unlinked_s: float = 6.0
    starved_s: float = 300.0
    stop_s: float = 60.0
    queued_s: float = DAY_S
    kept_s: float = 30 * DAY_S
