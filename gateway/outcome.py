"""The outcome of a query, recorded once, with each of its attempts. Pure values."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.decision import Decision
from gateway.domain import Finish
from gateway.ending import Ending
from gateway.prices import Prices
from predictor.forecast import Forecast

CUT_SHORT = frozenset((Finish.LENGTH, Finish.CONTENT_FILTER))
"""Finish reasons of answers ended by a limit (of the query, the site or a budget) or a filter."""


class Status(StrEnum):
    ANSWERED = "answered"
    CANCELLED = "cancelled"  # the client disconnected
    FAILED = "failed"  # accepted, then ended with an error for the client
    REFUSED = "refused"  # never reached a site, or every site refused it


class Attempt(msgspec.Struct, frozen=True):
    """One try of one query on one site, for the record. `ended` is "finished" or the cause of the failure.

    The first `resumed_tokens` of `completion_tokens` came from earlier sites, and are input for this one.
    `cached_tokens`: the prompt tokens that the site had cached. `prices` is None in records from before
    prices existed.
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
    """The outcome of one query, recorded once. Durations in seconds; `received_at` is unix time.
    `cheapest_nano_usd` and `dearest_nano_usd`: the least and the greatest cost of the same tokens, of the
    cost paid and the costs at other sites that were compared.
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
    mistaken: bool = False  # ended by a mistake or a limit of the client, not by a failure of the gateway
    ending: Ending = Ending()
    asked_model: str = ""
    cheapest_nano_usd: int = 0
    dearest_nano_usd: int = 0
    max_tokens: int | None = None  # the limit that the query set itself

    @property
    def tells_length(self) -> bool:
        """Return whether `completion_tokens` is the length of one answer, complete or cut at `max_tokens`."""
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
        """Return the cost of all attempts, in nano-dollars."""
        return sum([attempt.nano_usd for attempt in self.attempts])
