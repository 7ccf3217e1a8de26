"""Convert outcomes and events to the rows that are journaled and stored, and back.

Does not keep any text of a prompt or an answer, only lengths in tokens.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

import msgspec

from gateway.decision import Decision, Estimate
from gateway.outcome import Attempt, Outcome
from gateway.prices import Prices
from gateway.site_events import Event
from predictor.forecast import Forecast

TEXT_LIMIT = 500


class UsageRow(msgspec.Struct, frozen=True):
    """The end of one query. `query_id` is ours and unique; clients know `request_id` and may reuse it."""

    query_id: str
    request_id: str
    received_at: float
    tenant: str
    key_id: str
    model: str
    status: str
    error: str
    site: str
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    forecast_source: str | None = None
    forecast_expected: float | None = None
    forecast_p50: int | None = None
    forecast_p90: int | None = None
    cloud: str = ""
    asked_model: str = ""
    nano_usd: int | None = None  # None: written by a version that priced nothing
    cheapest_nano_usd: int | None = None
    dearest_nano_usd: int | None = None


class DecisionRow(msgspec.Struct, frozen=True):
    """One attempt of a query, with the inputs of its decision."""

    query_id: str
    attempt: int
    received_at: float
    attempt_id: str
    site: str
    policy: str
    reason: str
    decided_s: float
    estimates: list[dict[str, Any]]
    excluded: dict[str, str]
    ended: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float | None
    model: str = ""
    cached_tokens: int | None = None
    resumed_tokens: int | None = None
    nano_usd: int | None = None
    prices: dict[str, float] | None = None


class EventRow(msgspec.Struct, frozen=True):
    """An event of a site that one replica saw. Events of one process with equal `at` are ordered by `id`."""

    id: str
    at: float
    site: str
    kind: str
    text: str
    bad: bool
    replica: str


class Record(msgspec.Struct, frozen=True):
    """The rows of a query: one line of the journal, stored in one transaction."""

    usage: UsageRow
    decisions: tuple[DecisionRow, ...]


class _Line(msgspec.Struct):
    """A line of the journal: a record's fields, or an event."""

    usage: UsageRow | None = None
    decisions: tuple[DecisionRow, ...] = ()
    event: EventRow | None = None


_line_encoder = msgspec.json.Encoder()
_line_decoder = msgspec.json.Decoder(_Line)


def to_line(row: Record | EventRow) -> bytes:
    """Encode a line of the journal, with its newline."""
    return _line_encoder.encode({"event": row} if isinstance(row, EventRow) else row) + b"\n"


def from_line(line: bytes) -> Record | EventRow:
    """Decode a line of the journal. Raises msgspec.MsgspecError when it is neither a record nor an event."""
    found = _line_decoder.decode(line)
    if found.event is not None:
        return found.event
    if found.usage is None:
        raise msgspec.ValidationError("neither a query nor an event")
    return Record(found.usage, found.decisions)


def event_row(id_: str, event: Event, replica: str) -> EventRow:
    return EventRow(id_, event.at, event.site, event.kind, _text(event.text), event.bad, _text(replica))


def event_of(row: EventRow) -> Event:
    return Event(row.at, row.kind, row.site, row.text, bad=row.bad)


def record_of(outcome: Outcome, cloud: str = "") -> Record:
    """Convert an outcome. `cloud` is the cloud of the outcome's site."""
    return Record(_usage_row(outcome, cloud), _decision_rows(outcome))


def _usage_row(outcome: Outcome, cloud: str) -> UsageRow:
    return UsageRow(
        query_id=outcome.query_id,
        request_id=_text(outcome.request_id),
        received_at=outcome.received_at,
        tenant=outcome.tenant,
        key_id=outcome.key_id,
        model=_text(outcome.model),
        status=outcome.status.value,
        error=_text(outcome.error),
        site=outcome.site,
        attempts=len(outcome.attempts),
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        queue_s=_finite(outcome.queue_s),
        first_token_s=_finite(outcome.first_token_s),
        total_s=_finite(outcome.total_s) or 0.0,
        **_forecast_columns(outcome.forecast),
        cloud=_text(cloud),
        asked_model=_text(outcome.asked_model),
        nano_usd=outcome.nano_usd,
        cheapest_nano_usd=outcome.cheapest_nano_usd,
        dearest_nano_usd=outcome.dearest_nano_usd,
    )


def _forecast_columns(forecast: Forecast | None) -> dict[str, Any]:
    if forecast is None:
        return {}
    expected, p50, p90 = forecast.summary
    return {
        "forecast_source": forecast.source,
        "forecast_expected": _finite(expected),
        "forecast_p50": p50,
        "forecast_p90": p90,
    }


def _decision_rows(outcome: Outcome) -> tuple[DecisionRow, ...]:
    return tuple(
        DecisionRow(
            query_id=outcome.query_id,
            attempt=number,
            received_at=outcome.received_at,
            attempt_id=attempt.decision.attempt_id,
            site=attempt.decision.site,
            policy=attempt.decision.policy,
            reason=_text(attempt.decision.reason),
            decided_s=_finite(attempt.decision.decided_s) or 0.0,
            estimates=[msgspec.to_builtins(estimate) for estimate in attempt.decision.estimates],
            excluded={site: _text(why) for site, why in attempt.decision.excluded.items()},
            ended=_text(attempt.ended),
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.completion_tokens,
            first_token_s=_finite(attempt.first_token_s),
            model=_text(attempt.model),
            cached_tokens=attempt.cached_tokens,
            resumed_tokens=attempt.resumed_tokens,
            nano_usd=attempt.nano_usd,
            prices=msgspec.to_builtins(attempt.prices),
        )
        for number, attempt in enumerate(outcome.attempts)
    )


def attempt_of(row: DecisionRow) -> Attempt:
    decision = Decision(
        query_id=row.query_id,
        attempt_id=row.attempt_id,
        site=row.site,
        policy=row.policy,
        reason=row.reason,
        estimates=tuple(_estimate(values) for values in row.estimates),
        excluded=row.excluded,
        decided_s=row.decided_s,
    )
    return Attempt(
        decision,
        row.ended,
        row.prompt_tokens,
        row.completion_tokens,
        row.first_token_s,
        row.model,
        cached_tokens=row.cached_tokens or 0,
        resumed_tokens=row.resumed_tokens or 0,
        prices=Prices(**row.prices) if row.prices else None,
        nano_usd=row.nano_usd or 0,
    )


def _estimate(values: dict[str, Any]) -> Estimate:
    """Convert back; null stands for infinity, which JSON does not have."""
    cost = values.get("cost")
    finite: dict[str, Any] = {name: inf if value is None else value for name, value in values.items()}
    return Estimate(**finite | {"cost": cost})


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _text(value: str) -> str:
    """Return outside text in a form that every database accepts: bounded, valid UTF-8, no NUL."""
    if len(value) <= TEXT_LIMIT and value.isascii() and "\0" not in value:
        return value
    return value[:TEXT_LIMIT].encode("utf-8", "replace").decode().replace("\0", "�")
