"""Choose the next line of an offline batch, for the orders that `bench.blend` compares."""

from __future__ import annotations

from collections.abc import Sequence

from bench.support.offline_work import Line
from site_engine.core.scheduler import Scheduler


class Chooser:
    """Chooses the next line each time the scheduler asks. `forecasts`: the lines, with expected lengths."""

    def __init__(self, forecasts: Sequence[Line]) -> None:
        self.lines = forecasts

    def peek(self, scheduler: Scheduler) -> int | None:
        raise NotImplementedError

    def taken(self, at: int) -> None:
        raise NotImplementedError

    def ended(self, at: int) -> None:
        """Learn that a line has ended."""
