"""Says which batches must go first so that they end within their windows. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.batches.values import Batch

HURRY_SHARE: Final = 0.8
"""A batch that is expected to end after this share of its window goes first."""
LEARN_S: Final = 600.0
"""Seconds for which a batch runs until its pace is known."""
FIRST_PRIORITY: Final = -(2**31)
"""Of the lines of a batch that goes first: at a site they start before those of all other batches."""


class Progress(NamedTuple):
    """Lines that have ended in the `ran_s` seconds that a batch has run here, and those that are left."""

    ran_s: float
    ended: int
    left: int


def is_late(batch: Batch, progress: Progress, unix_time: float) -> bool:
    """Return whether a batch must go first: at its pace its last line would end too late."""
    due = batch.created_at + HURRY_SHARE * (batch.expires_at - batch.created_at)
    if not progress.left:
        return False
    if progress.ran_s < LEARN_S:
        return unix_time > due
    return unix_time + progress.left * progress.ran_s / max(1, progress.ended) > due
