"""How many requests to keep in a server at once, learned: enough that it never starves, few enough that what
waits does so here, where it can still be released to another site. And what a provider allows a minute.
"""

from __future__ import annotations

LEAST, FIRST = 2, 8
QUEUE_TOLERATED = 1
"""So many may wait in the server's own queue: the next to run is there when a slot frees."""
SLOW_FACTOR, SLOW_S = 4.0, 0.25
"""Without the server's figures: a first token this much slower than the quickest ones says that it queues."""
BASE_RISE = 1.02
MINUTE_S = 60.0


class Window:
    """`most` is the operator's limit. Doubles while nothing queues, then feels its way up one by one."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._least = min(LEAST, self._most)
        self._size = float(min(FIRST, self._most))
        self._found_limit = False
        self._quickest_s: float | None = None

    @property
    def size(self) -> int:
        return int(self._size)

    def figures(self, *, sent: int, waiting: int) -> None:
        """The server's own word on its queue. `sent` are ours there; the surplus should wait here."""
        if waiting > QUEUE_TOLERATED and sent > self._least:
            self._shrink(sent - (waiting - QUEUE_TOLERATED))
        elif waiting == 0 and sent >= self.size:
            self._grow(1.0 if self._found_limit else sent)

    def first_token(self, seconds: float, *, sent: int, queues: bool | None) -> None:
        """`queues`: whether the server says so. If it does not say, the time of a first token tells."""
        quickest = seconds if self._quickest_s is None else min(seconds, self._quickest_s * BASE_RISE)
        self._quickest_s = quickest
        if queues is None and seconds > quickest * SLOW_FACTOR + SLOW_S:
            self._shrink(self._size * 0.9)
        elif not queues and sent >= self.size:
            self._grow(1.0 if not self._found_limit else 1.0 / self._size)

    def refused(self) -> None:
        """The server said that it is full."""
        self._shrink(self._size / 2)

    def _shrink(self, size: float) -> None:
        self._found_limit = True
        self._size = max(float(self._least), min(self._size, size))

    def _grow(self, by: float) -> None:
        self._size = min(float(self._most), self._size + by)


class Allowance:
    """What a provider lets through a minute, as two buckets that fill evenly; None: no limit."""

    def __init__(self, requests_per_min: int | None, tokens_per_min: int | None, now: float) -> None:
        self._limits = (requests_per_min, tokens_per_min)
        self._left = [float(limit or 0) for limit in self._limits]
        self._filled_s = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Until a request of so many tokens may go; one larger than a whole bucket waits for a full one."""
        self._fill(now)
        waits = [0.0]
        for limit, left, need in zip(self._limits, self._left, (1, tokens), strict=True):
            if limit is not None:
                waits.append((min(need, limit) - left) * MINUTE_S / limit)
        return max(waits)

    def take(self, tokens: int, now: float) -> None:
        self._fill(now)
        self._left = [left - need for left, need in zip(self._left, (1, tokens), strict=True)]

    def _fill(self, now: float) -> None:
        passed, self._filled_s = now - self._filled_s, now
        self._left = [
            left if limit is None else min(float(limit), left + passed * limit / MINUTE_S)
            for limit, left in zip(self._limits, self._left, strict=True)
        ]
