"""Decide how long text waits to be sent together: not at all while the event loop has time for each send.

A send costs the same however much text it has, so under load a loop gains time by sending less often. Pure
bookkeeping; the caller passes the times.
"""

from __future__ import annotations

LOOP_SHARE = 0.6
"""Text waits for the next once the loop computes for more than this share of the time."""


class SendPace:
    """`due_s` is the time from which the next text may be sent, at most `longest_s` after the last."""

    def __init__(self, longest_s: float) -> None:
        self.due_s = float("-inf")
        self._longest_s = longest_s
        self._sent_s = float("-inf")
        self._busy_s = 0.0
        self._over_s = 0.0  # CPU seconds beyond the share, which later time makes up for

    def sent(self, now: float, busy_s: float) -> None:
        """Note that text was sent. `busy_s`: the CPU seconds of the loop's thread so far.

        The next waits until the loop is down to LOOP_SHARE since it was last below it. What a wait of
        `longest_s` does not make up for is forgotten.
        """
        spare_s = LOOP_SHARE * (now - self._sent_s)
        over_s = max(0.0, self._over_s + busy_s - self._busy_s - spare_s)
        self._over_s = min(over_s, LOOP_SHARE * self._longest_s)
        self.due_s = now + self._over_s / LOOP_SHARE
        self._sent_s, self._busy_s = now, busy_s
