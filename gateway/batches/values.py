"""What batches are made of: files, batches, lines, and how large each may be. Frozen and plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

HOUR_S: Final = 3_600.0
DAY_S: Final = 24 * HOUR_S
WINDOW: Final = "24h"
WINDOW_S: Final = DAY_S
MIB: Final = 2**20


class Purpose(StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNENDED: Final = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The first two are OpenAI's. `in_flight`: lines of one replica at once, and their bytes."""

    file_bytes: int = 200 * MIB
    lines: int = 50_000
    line_bytes: int = 8 * MIB
    custom_id_chars: int = 512
    tenant_bytes: int = 2_048 * MIB
    tenant_batches: int = 100
    replica_batches: int = 8
    in_flight: int = 512
    in_flight_bytes: int = 64 * MIB
    failures: int = 3
    kept_s: float = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class File:
    """Times are unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float


class Fault(NamedTuple):
    """Why a file is no batch; `line` counts from 1, None is the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one that has not ended, `completed` and `failed` count the lines that have an outcome by now."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    created_at: float
    expires_at: float
    output_kept_s: float
    completion_window: str = WINDOW
    about: Mapping[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    model: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    leased_by: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in UNENDED


@dataclass(frozen=True, slots=True)
class Line:
    """One query of a batch: where its bytes lie in the input file, what is expected of it, and what became of
    earlier runs of it. `place` is its turn.
    """

    number: int
    place: int
    custom_id: str
    begins: int
    size: int
    prompt_tokens: int
    response_tokens: float
    runs: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The line of the output file (or of the error file, if it failed) that answers a line."""

    number: int
    failed: bool
    text: bytes = field(repr=False)
