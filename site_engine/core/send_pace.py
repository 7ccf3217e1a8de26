"""Decide how long deltas wait to be sent together: not at all while the event loop has time for each.

A send costs the same however many tokens its deltas hold, so under load the loop gains time by sending less
often. Pure bookkeeping; the caller passes the times.
"""

from __future__ import annotations

LOOP_SHARE = 0.5
"""Deltas wait for one another once the loop computes for more than this share of the time."""


class SendPace:
    """`due_s` is the time from which the next deltas may be sent, `longest_s` the longest that they wait."""

    def __init__(self, longest_s: float) -> None:
        self.due_s = float("-inf")
        self._longest_s = longest_s
        self._sent_s = float("-inf")
        self._busy_s = 0.0

    def sent(self, now: float, busy_s: float) -> None:
        """Note that deltas were sent. `busy_s`: the CPU seconds of the loop's thread so far.

        Waiting for what the loop has computed since the last send, divided by LOOP_SHARE, brings the loop
        down to that share. Of a longer pause than `longest_s` only the average counts, else an idle loop
        would begin with a wait.
        """
        elapsed_s = now - self._sent_s
        computed_s = busy_s - self._busy_s
        if elapsed_s > self._longest_s:
            computed_s *= self._longest_s / elapsed_s
        self.due_s = now + min(self._longest_s, computed_s / LOOP_SHARE)
        self._sent_s, self._busy_s = now, busy_s
