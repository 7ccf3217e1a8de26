"""Measure how long something has made no progress, counting only time in which this process ran."""

from __future__ import annotations

MAX_GAP_S = 1.0
"""Most seconds counted between two calls: a longer gap means that this process was stopped, too."""


class StallWatch:
    """Detects missing progress. `look` must be called a few times per second."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._looked_s = float("-inf")
        self._still_s = 0.0

    def look(self, since_s: float | None, now: float) -> float:
        """Return the seconds without progress. `since_s`: time of the last progress, None if none is due."""
        gap_s, self._looked_s = now - self._looked_s, now
        if since_s is None:
            self._still_s = 0.0
        elif since_s != self._since_s:
            self._still_s = min(now - since_s, MAX_GAP_S)
        else:
            self._still_s += min(gap_s, MAX_GAP_S)
        self._since_s = since_s
        return self._still_s
