"""Outcomes of queries that have ended, for tests of what observes them."""

from __future__ import annotations

from gateway.decision import Decision
from gateway.outcome import Attempt, Outcome, Status
from predictor.forecast import Forecast


def attempt(site: str, ended: str = "finished", reason: str = "earliest finish: in 1 s") -> Attempt:
    return Attempt(Decision("q", f"at-{site}", site, "mico", reason, (), {}, 0.0), ended, 5, 9, 0.2)


ANSWERED = Outcome(
    query_id="q",
    request_id="r",
    tenant="t",
    key_id="k",
    model="m",
    status=Status.ANSWERED,
    error="",
    prompt_tokens=5,
    completion_tokens=9,
    forecast=Forecast((0, 19), (1.0,), "test"),
    attempts=(attempt("a"),),
    received_at=0.0,
    queue_s=0.01,
    first_token_s=0.2,
    total_s=1.0,
)
