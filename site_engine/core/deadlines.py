"""Keep the deadlines of requests, earliest first."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol


class LiveIds(Container[str], Sized, Protocol):
    """The ids of requests that have not ended."""


class Deadlines:
    """A heap of (deadline, request id). Entries of ended requests, and duplicates for requests that were
    submitted again, stay until they are due or are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_s: float, request_id: str, live: LiveIds) -> None:
        """Add a deadline. Drops stale entries once they are the majority."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = list({entry for entry in self._heap if entry[1] in live})
            heapify(self._heap)
        heappush(self._heap, (deadline_s, request_id))

    def pop_due(self, now: float) -> Iterator[tuple[float, str]]:
        """Remove and yield the entries due at `now`, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)
