"""Reads the lines of a batch that wait for their first run, in the order of running and a page at a time."""

from __future__ import annotations

from collections import deque
from typing import Final

from gateway.batches.blend import Blend
from gateway.batches.ledger import Ledger
from gateway.batches.values import Line

PAGE_LINES: Final = 256


class _Pages:
    """The next lines; of one kind, unless `prefill_heavy` is None."""

    def __init__(self, prefill_heavy: bool | None) -> None:
        self.prefill_heavy = prefill_heavy
        self.lines: deque[Line] = deque()
        self.last_place = -1
        self.read_all = False


class WaitingLines:
    """The lines in order or, in any order, from two ends: those with long prompts, and the others."""

    def __init__(self, any_order: bool) -> None:
        self._ends = [_Pages(False), _Pages(True)] if any_order else [_Pages(None)]

    def __bool__(self) -> bool:
        return any(end.lines for end in self._ends)

    async def refill(self, ledger: Ledger, batch_id: str) -> None:
        """Read the next page of lines of each kind, after the place of the last one."""
        for end in self._ends:
            if end.read_all or len(end.lines) >= PAGE_LINES:
                continue
            page = await ledger.unanswered(batch_id, end.last_place, PAGE_LINES, end.prefill_heavy)
            end.lines += page
            end.last_place = page[-1].place if page else end.last_place
            end.read_all = len(page) < PAGE_LINES

    def next_end(self, blend: Blend, at_sites: int, waiting: int) -> deque[Line]:
        """Return the lines of which the first is next, in any order as `blend` says."""
        first, last = self._ends[0].lines, self._ends[-1].lines
        return first if first is last else blend.next_end(first, last, at_sites, waiting)
