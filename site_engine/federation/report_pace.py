"""Decide when the load has changed so much that a gateway should know: a report costs it as much as a token.

Between two reports a gateway takes the last one for true. What it decides by is then off by a known bound at
most: requests and KV by `SHARE` of the site, seconds of work by `SHARE` of themselves or `SECONDS`. A gateway
with many sites asks for a multiple of that bound. Pure bookkeeping; the caller passes the time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from site_engine import messages as m

SHARE = 1 / 16
SECONDS = 0.05
REPORT_EVERY_S = 1.0
"""However little changes: a gateway takes a site that reports less often for lost."""
MAX_TIMES = 16
"""Whatever a gateway asks for, reports are not further off, nor more seldom. One that asks for so many times
the bound asks for no bids either, and is not told at once that nothing is left to do.
"""


class Cost(Protocol):
    def seconds(self, rows: int, tokens: int, kv_tokens: int) -> float: ...
    @property
    def per_token_s(self) -> float: ...


class Figures(Protocol):
    """What gateways decide by of a load report, the engine's or the simulator's."""

    @property
    def running(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def kv_free_tokens(self) -> int: ...
    @property
    def kv_reserved_tokens(self) -> int: ...
    @property
    def kv_extra_tokens(self) -> int: ...
    @property
    def running_remaining(self) -> tuple[int, ...]: ...
    @property
    def running_weight(self) -> int: ...
    @property
    def pending_prompt_tokens(self) -> int: ...
    @property
    def pending_response_tokens(self) -> float: ...
    @property
    def unread_tokens(self) -> int: ...
    @property
    def seconds_per_iteration(self) -> float: ...
    @property
    def iteration(self) -> Cost: ...
    @property
    def training_s_per_iteration(self) -> float: ...


class LoadSummary(NamedTuple):
    """What gateways decide by of a report."""

    running: int
    requests: int
    kv_tokens: int  # free, and not reserved
    iteration_s: float  # of all that runs
    prefill_s: float  # of prompts that are not computed
    decode_s: float  # of the answers to all requests, in full batches

    @classmethod
    def of(cls, figures: Figures, slots: int, kv_capacity_tokens: int) -> LoadSummary:
        cost, rows = figures.iteration, max(1, figures.running)
        used = max(0, kv_capacity_tokens + figures.kv_extra_tokens - figures.kv_free_tokens)
        iteration_s = cost.seconds(rows, rows, used) or figures.seconds_per_iteration
        response = sum(figures.running_remaining) * figures.running_weight + figures.pending_response_tokens
        return cls(
            figures.running,
            figures.running + figures.pending,
            figures.kv_free_tokens - figures.kv_reserved_tokens,
            iteration_s + figures.training_s_per_iteration,
            cost.per_token_s * (figures.unread_tokens + figures.pending_prompt_tokens),
            iteration_s * response / max(1, slots),
        )

    def differs(self, now: LoadSummary, slots: int, kv_capacity_tokens: int, times: int) -> bool:
        """Return whether this report is off by more than so many times the bound, or hides that nothing is
        left to do.
        """
        share = times * SHARE
        few, little = share * slots, share * kv_capacity_tokens
        return (
            abs(now.requests - self.requests) > few
            or abs(now.running - self.running) > few
            or abs(now.kv_tokens - self.kv_tokens) > little
            or _off(self.prefill_s, now.prefill_s, times)
            or _off(self.decode_s, now.decode_s, times)
            or abs(now.iteration_s - self.iteration_s) > share * self.iteration_s
            or (now.requests == 0 < self.requests and times < MAX_TIMES)
        )


def _off(reported_s: float, now_s: float, times: int) -> bool:
    return abs(now_s - reported_s) > times * max(SECONDS, SHARE * reported_s)


class ReportPace:
    """Of one gateway: the report that it has of the site, and what has changed since."""

    def __init__(self, slots: int, kv_capacity_tokens: int) -> None:
        self._times_off, self.every_s = 1, REPORT_EVERY_S
        self._slots = slots
        self._kv_capacity_tokens = kv_capacity_tokens
        self._reported: LoadSummary | None = None
        self._reported_s = float("-inf")
        self._admitted = self._ended = 0

    @property
    def is_rare(self) -> bool:
        return self._times_off == MAX_TIMES

    def agree(self, asked: m.ReportPace) -> None:
        """Do what the gateway asks for, and have the next figures reported."""
        self._times_off = max(1, min(MAX_TIMES, asked.times_off))
        self.every_s = REPORT_EVERY_S * max(1, min(MAX_TIMES, asked.every_s))
        self._reported = None

    def admitted(self) -> None:
        """Note a request that the gateway adds to what was reported, until the next report counts it."""
        self._admitted += 1

    def ended(self, requests: int) -> None:
        """Note requests that the gateway leaves out of what was reported, until the next report."""
        self._ended += requests

    def is_late(self, now: float) -> bool:
        """Return whether the gateway must have a report, whatever it tells."""
        return self._reported is None or now - self._reported_s >= self.every_s

    def is_due(self, seen: LoadSummary, now: float) -> bool:
        """Return whether the load that is seen now must be reported."""
        if self._reported is None or self.is_late(now):
            return True
        if max(self._admitted, self._ended) > self._times_off * SHARE * self._slots:
            return True
        return self._reported.differs(seen, self._slots, self._kv_capacity_tokens, self._times_off)

    def reported(self, seen: LoadSummary, now: float) -> None:
        self._reported, self._reported_s = seen, now
        self._admitted = self._ended = 0

    def forget(self) -> None:
        """Have the next figures reported, whatever they are."""
        self._reported = None
