"""Defines the values of batches: files, batches, lines, outcomes and their limits. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

HOUR_S: Final = 3_600.0
DAY_S: Final = 24 * HOUR_S
COMPLETION_WINDOW: Final = "24h"
WINDOW_S: Final = DAY_S
MIB: Final = 2**20


ORDER_KEY: Final = "mico_order"
"""Of the metadata of a batch: the order in which its lines run."""


class Order(StrEnum):
    """`blend`: groups that begin alike, the long ones spread; `prefix`: such groups as the file has them."""

    BLEND = "blend"
    LONGEST = "longest"
    PREFIX = "prefix"
    FILE = "file"


class Purpose(StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"
    FINE_TUNE = "fine-tune"
    FINE_TUNE_RESULTS = "fine-tune-results"


class BatchStatus(StrEnum):
    """OpenAI's statuses."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED: Final = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`file_bytes` and `lines` are OpenAI's. `in_flight`: lines that one replica runs at once, or more if the
    sites of their model have more slots; `starting`: those of them that no site has yet, which take this
    process's time and so that of interactive queries.

    `replica_batches`: batches that one replica runs at once; `idle_batches`: those that it holds beside them
    because none of their lines has run for a while. `failures`: failed runs after which a line has failed
    for good.
    `tenant_batches`: batches of a tenant that have not ended.
    """

    file_bytes: int = 200 * MIB
    lines: int = 50_000
    line_bytes: int = 8 * MIB
    custom_id_chars: int = 512
    tenant_bytes: int = 2_048 * MIB
    tenant_batches: int = 100
    replica_batches: int = 8
    idle_batches: int = 64
    in_flight: int = 512
    starting: int = 8
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


class BatchError(NamedTuple):
    """One reason why a file is not a valid batch. `line` counts from 1; None is the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Outline(NamedTuple):
    """What the lines of a batch are expected to take, as estimated when its file was read.

    `groups`: those of two lines or more that begin alike. `shared_tokens` of the prompts need not be computed
    if the lines of each group run one after another.
    """

    groups: int
    prompt_tokens: int
    shared_tokens: int
    response_tokens: int


class RunningLines(NamedTuple):
    """What the replica that runs a batch tells about it: the number of its lines that run, and when its last
    line is expected to end, in unix seconds; None until that is known.
    """

    in_flight: int = 0
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """`completed` and `failed` count lines: those with an outcome by now if the batch has not ended.

    `about` is the client's metadata. `in_flight` and `ends_at` are those of `RunningLines`, as old as the
    last renewal of the lease. `usage` is OpenAI's, of the answers of a batch that has ended.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    created_at: float
    expires_at: float
    output_kept_s: float
    completion_window: str = COMPLETION_WINDOW
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
    outline: Outline | None = None
    in_flight: int = 0
    ends_at: float | None = None
    usage: Mapping[str, Any] | None = None
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    leased_by: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in UNFINISHED

    @property
    def order(self) -> Order:
        """Return the order of its lines, which the client can choose in `about`."""
        chosen = (self.about or {}).get(ORDER_KEY)
        return Order(chosen) if chosen in tuple(Order) else Order.BLEND


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    `number` is the line in the input file, from 1; `begins` and `size` are the offset and length of its bytes
    there; `place` is its position in the order of running. `prompt_tokens` and `response_tokens` are
    estimates. `group` is the number of the first line that begins with the same `shared_tokens`. `runs`
    counts the earlier runs without an outcome, `failures` those of them for which a site or the gateway was
    to blame.
    """

    number: int
    place: int
    custom_id: str
    begins: int
    size: int
    prompt_tokens: int
    response_tokens: float
    group: int = 0
    shared_tokens: int = 0
    runs: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of line `number`: its line of the output file or, if it failed, of the error file."""

    number: int
    failed: bool
    text: bytes = field(repr=False)
