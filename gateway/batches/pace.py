"""Says when a batch is expected to end, and which must go first to end within their windows. Pure."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from gateway.batches.values import Batch, Line
from gateway.routing.fleet import PROMPT_TOKEN_WORK

HURRY_SHARE: Final = 0.8
"""A batch that is expected to end after this share of its window goes first."""
LEARN_S: Final = 600.0
"""Seconds for which a batch runs until its pace is known."""
FIRST_PRIORITY: Final = -(2**31)
"""Of the lines of a batch that goes first: at a site they start before those of all other batches."""


class Progress(NamedTuple):
    """Work, as `work_of` counts it, of the lines that have ended in the `ran_s` seconds that a batch has run
    here, of those that run, and of all that are left, running ones included.
    """

    ran_s: float
    ended: float
    running: float
    left: float

    @property
    def left_s(self) -> float:
        """Seconds until the last line ends if the pace stays. Lines that run are half done on the average."""
        half = self.running / 2
        done = self.ended + half
        return (self.left - half) * self.ran_s / done if done else inf

    @property
    def is_known(self) -> bool:
        """Whether as much has ended as runs, so that the pace is more than that of the first few lines."""
        return self.ended >= self.running and self.ended > 0


def work_of(line: Line) -> float:
    """Return the work that a line is expected to be, in tokens of an answer; every line is some."""
    return 1 + line.response_tokens + PROMPT_TOKEN_WORK * (line.prompt_tokens - line.shared_tokens)


def is_late(batch: Batch, progress: Progress, unix_time: float) -> bool:
    """Return whether a batch must go first: at its pace its last line would end too late."""
    due = batch.created_at + HURRY_SHARE * (batch.expires_at - batch.created_at)
    if not progress.left:
        return False
    if progress.ran_s < LEARN_S:
        return unix_time > due
    return unix_time + progress.left_s > due
