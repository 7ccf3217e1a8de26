"""Define training jobs: orders, hyperparameters and events, as plain values for engine, site and link."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

MAX_BATCH_SIZE = 1024
WARMUP_SHARE = 0.03
"""Share of steps in which the learning rate rises from 0; it then falls to 0 (the recipe of QLoRA)."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """`target`: "all-linear" for every projection of the layers, "attention" for those of attention only."""

    rank: int = 16
    alpha: float = 32.0
    target: str = "all-linear"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of a job. `seed` sets the order of examples and the initial adapter weights."""

    epochs: int = 3
    batch_size: int = 16  # examples of an optimizer step
    learning_rate: float = 2e-4
    seed: int = 0
    shape: AdapterShape = field(default_factory=AdapterShape)

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 0 < self.batch_size <= MAX_BATCH_SIZE:
            raise ValueError(f"epochs must be at least 1, and batch_size 1 to {MAX_BATCH_SIZE}")
        for name, value in (("learning_rate", self.learning_rate), ("alpha", self.shape.alpha)):
            if not (isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be a positive number, got {value}")

    def steps_per_epoch(self, examples: int) -> int:
        return -(-examples // self.batch_size)

    def total_steps(self, examples: int) -> int:
        return self.epochs * self.steps_per_epoch(examples)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of a step, counted from 0: linear up, then linear down."""
        warmup = round(WARMUP_SHARE * total_steps)
        if step < warmup:
            return self.learning_rate * step / warmup
        return self.learning_rate * (total_steps - step) / (total_steps - warmup)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """A job for an engine: the whole files, and the snapshot to continue from (empty for a new job)."""

    job_id: str
    tenant: str
    recipe: Recipe
    data: bytes
    valid: bytes = b""
    snapshot: bytes = b""


class StepDone(NamedTuple):
    """One optimizer step: the mean loss of its trained tokens, and the share that the model ranks first.

    `trained_tokens`: of the job so far. `valid_loss`: of the validation file, after each epoch's last step.
    """

    step: int
    total_steps: int
    loss: float
    accuracy: float
    trained_tokens: int
    valid_loss: float | None = None


class Saved(NamedTuple):
    """A snapshot as the bytes of a file. `last`: it holds the trained adapter."""

    step: int
    last: bool
    data: bytes


class Failed(NamedTuple):
    """The end of a job that cannot be trained here. `elsewhere`: another site may continue it."""

    reason: str
    elsewhere: bool = False


TrainingEvent: TypeAlias = StepDone | Saved | Failed


# ---- on the link


@dataclass(frozen=True, slots=True)
class Trains:
    """The training that a site offers: `runs` concurrent runs and a price (0: free, or paid by the hour)."""

    runs: int
    max_rank: int
    usd_per_mtok: float = 0.0


@dataclass(frozen=True, slots=True)
class Content:
    """Content that is fetched or stored outside the link, by its SHA-256 digest."""

    sha256: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Train:
    """The order for a run of a job. The run's name fences it: messages of other runs are dropped.

    `revision` is that of the base in earlier runs, empty in the first.
    """

    job_id: str
    run: str
    tenant: str
    model: str  # the base
    tuned_model: str
    data: Content
    validation: Content | None = None
    snapshot: Content | None = None
    epochs: int = 3
    batch_size: int = 16
    learning_rate: float = 2e-4
    rank: int = 16
    alpha: float = 32.0
    target: str = "all-linear"
    seed: int = 0
    revision: str = ""

    def recipe(self) -> Recipe:
        """Return the hyperparameters. Raises ValueError for values out of range."""
        shape = AdapterShape(self.rank, self.alpha, self.target)
        return Recipe(self.epochs, self.batch_size, self.learning_rate, self.seed, shape)


@dataclass(frozen=True, slots=True)
class StopTraining:
    """The order to end a run. With `snapshot` its state is stored first, else dropped, even after its end."""

    run: str
    snapshot: bool


class Kind(IntEnum):
    """The kinds of content that a run stores; numbers as on the wire."""

    SNAPSHOT = 0
    CHECKPOINT = 1
    ADAPTER = 2


class End(IntEnum):
    """The ways in which a run ends; numbers as on the wire."""

    RUNNING = 0
    SUCCEEDED = 1
    FAILED = 2  # the job can't succeed anywhere
    STOPPED = 3
    GIVEN_UP = 4  # another site may go on


@dataclass(frozen=True, slots=True)
class Training:
    """A report of a run. `steps` are the newest steps, including steps reported before."""

    job_id: str
    run: str
    step: int
    total_steps: int
    trained_tokens: int
    steps: tuple[StepDone, ...]
    tokens_per_s: float
    end: End
    error_code: str
    error: str
    revision: str
