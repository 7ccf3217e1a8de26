"""What a job trains and how: plain values, and the learning rate of each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from site_engine.training.adapter import AdapterShape
from site_engine.training.packing import batches_per_epoch

WARMUP_SHARE = 0.03
"""Of all steps: the learning rate rises from 0 during these, then falls to 0, as QLoRA's recipe does."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of a job. Of the order of examples and the first factors, `seed` decides."""

    epochs: int = 3
    batch_size: int = 16  # examples of an optimizer step
    learning_rate: float = 2e-4
    seed: int = 0
    shape: AdapterShape = field(default_factory=AdapterShape)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0.0:
            raise ValueError("epochs, batch_size and learning_rate must be positive")

    def total_steps(self, examples: int) -> int:
        return self.epochs * batches_per_epoch(examples, self.batch_size)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of a step, counted from 0: linear up, then linear down."""
        warmup = round(WARMUP_SHARE * total_steps)
        if step < warmup:
            return self.learning_rate * step / warmup
        return self.learning_rate * (total_steps - step) / (total_steps - warmup)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
