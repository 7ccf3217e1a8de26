"""The end of a query: what is recorded of it, once, and of each of its attempts. Pure values."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.decision import Decision
from gateway.domain import Finish
from gateway.ending import Ending
from gateway.prices import Prices
from predictor.forecast import Forecast

CUT_SHORT = frozenset((Finish.LENGTH, Finish.CONTENT_FILTER))
"""Finish reasons of answers that a limit (of the query, of its site, of a budget) or a filter ended."""


class Status(StrEnum):
    ANSWERED = "answered"
    CANCELLED = "cancelled"  # the client went away
    FAILED = "failed"  # accepted, then an error the client could read
    REFUSED = "refused"  # never reached a site, or every site refused it


class Attempt(msgspec.Struct, frozen=True):
    """One try of one query on one site, for the record. `ended` is "finished" or the cause of the failure.

    Of `completion_tokens` the first `resumed_tokens` came from sites before, and are input of this one.
    `cached_tokens` is the part of the prompt that the site had. `prices` None: of before there were any.
    """

    decision: Decision
    ended: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float | None
    model: str = ""
    cached_tokens: int = 0
    resumed_tokens: int = 0
    prices: Prices | None = None
    nano_usd: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """One per query, recorded once. Durations in seconds; `received_at` is unix time. `cheapest_nano_usd` and
    `dearest_nano_usd`: the cost of the same tokens at other sites that were compared, or here.
    """

    query_id: str
    request_id: str
    tenant: str
    key_id: str
    model: str
    status: Status
    error: str
    prompt_tokens: int
    completion_tokens: int
    forecast: Forecast | None
    attempts: tuple[Attempt, ...]
    received_at: float
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    forecast_s: float | None = None
    traceparent: str = ""
    mistaken: bool = False  # it ended by a mistake or a limit of the client: no failure of the gateway
    ending: Ending = Ending()
    asked_model: str = ""
    cheapest_nano_usd: int = 0
    dearest_nano_usd: int = 0
    max_tokens: int | None = None  # the limit that the query set itself

    @property
    def tells_length(self) -> bool:
        """Return whether its tokens are those of one answer, cut short by the limit of the query at most."""
        reasons = self.ending.finish_reasons
        if self.status is not Status.ANSWERED or len(reasons) > 1:
            return False
        reached = self.max_tokens is not None and 0 < self.max_tokens <= self.completion_tokens
        cut_by = CUT_SHORT.intersection(reasons)
        return not cut_by or (reached and cut_by == {Finish.LENGTH})

    @property
    def site(self) -> str:
        """Return the site of the last attempt, empty if there was none."""
        return self.attempts[-1].decision.site if self.attempts else ""

    @property
    def nano_usd(self) -> int:
        """Return the cost of all attempts."""
        return sum([attempt.nano_usd for attempt in self.attempts])
