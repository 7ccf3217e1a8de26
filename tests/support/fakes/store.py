"""A database that fails on demand, and outcomes to store in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.decision import Decision, Estimate
from gateway.outcome import Attempt, Outcome, Status
from gateway.store.errors import RecordsRefused, StoreUnavailable
from gateway.store.rows import EventRow, Record
from predictor.forecast import Forecast

RECEIVED_AT = 4_000_000_000.25
"""In a future so far that no retention takes it away during a test."""

FORECAST = Forecast(edges=(0, 10, 100), probabilities=(0.5, 0.5), source="histogram")


def outcome(query_id: str = "q-1", *, attempts: int = 1, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "query_id": query_id,
        "request_id": f"request of {query_id}",
        "tenant": "default",
        "key_id": "key_1",
        "model": "demo",
        "status": Status.ANSWERED,
        "error": "",
        "prompt_tokens": 12,
        "completion_tokens": 34,
        "forecast": FORECAST,
        "attempts": tuple(attempt(query_id, number) for number in range(attempts)),
        "received_at": RECEIVED_AT,
        "queue_s": 0.01,
        "first_token_s": 0.2,
        "total_s": 1.5,
    }
    return Outcome(**(values | changes))


def attempt(query_id: str, number: int) -> Attempt:
    sites = ("aws/one", "gcp/two")
    decision = Decision(
        query_id=query_id,
        attempt_id=f"{query_id}.{number}",
        site=sites[number % 2],
        policy="mico",
        reason="finishes first",
        estimates=tuple(Estimate(site, 0.0, 0.2, 1.4, 0.001, 112, 0.05, 2.6) for site in sites),
        excluded={"azure/three": "draining"},
        decided_s=12.5 + number,
    )
    return Attempt(decision, ended="stop", prompt_tokens=12, completion_tokens=34, first_token_s=0.2)


class FakeWriter:
    """Keeps rows as a database would. Several writers may share `rows`, as processes share a database."""

    def __init__(self, rows: dict[str, Record] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.events: dict[str, EventRow] = {}
        self.down = False
        self.loses_the_answer = False
        self.poison: set[str] = set()
        self.offers = 0

    @property
    def works(self) -> bool:
        return not self.down and not self.loses_the_answer

    async def write(self, records: Sequence[Record | EventRow]) -> None:
        self.offers += 1
        if self.down:
            raise StoreUnavailable("the fake is down")
        queries = [each for each in records if isinstance(each, Record)]
        if any(record.usage.query_id in self.poison for record in queries):
            raise RecordsRefused("the fake does not like it")
        for record in queries:
            self.rows.setdefault(record.usage.query_id, record)
        self.events.update((each.id, each) for each in records if isinstance(each, EventRow))
        if self.loses_the_answer:
            raise StoreUnavailable("the connection broke after the commit")
