"""Outcomes to rows and back, with the hostile values that clients and sites can send."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.decision import Estimate
from gateway.outcome import Status
from gateway.prices import Prices
from gateway.site_events import Event
from gateway.store.rows import (
    TEXT_LIMIT,
    DecisionRow,
    EventRow,
    Record,
    UsageRow,
    attempt_of,
    event_of,
    event_row,
    from_line,
    record_of,
    to_line,
)
from gateway.store.tables import decisions, site_events, usage
from tests.support.fakes.store import FORECAST, attempt, outcome


def record_in(line: bytes) -> Record:
    found = from_line(line)
    assert isinstance(found, Record)
    return found


def test_rows_and_tables_have_the_same_columns() -> None:
    assert [field.name for field in msgspec.structs.fields(UsageRow)] == list(usage.c.keys())
    assert [field.name for field in msgspec.structs.fields(DecisionRow)] == list(decisions.c.keys())
    assert [field.name for field in msgspec.structs.fields(EventRow)] == list(site_events.c.keys())


def test_nothing_is_kept_that_could_hold_a_prompt() -> None:
    texts = {column.name for column in usage.c if column.type.python_type is str}
    assert texts == {
        "query_id",
        "request_id",
        "tenant",
        "key_id",
        "model",
        "asked_model",
        "status",
        "error",
        "site",
        "forecast_source",
        "cloud",
    }


def test_the_forecast_is_kept_as_its_figures() -> None:
    row = record_of(outcome()).usage
    assert (row.forecast_p50, row.forecast_p90) == (FORECAST.quantile(0.5), FORECAST.quantile(0.9))
    assert (row.forecast_source, row.forecast_expected) == ("histogram", FORECAST.expected())
    assert record_of(outcome(forecast=None)).usage.forecast_p90 is None


def test_a_line_of_a_version_that_knew_no_cloud_is_still_read() -> None:
    line = to_line(record_of(outcome(), "aws"))
    assert record_in(line).usage.cloud == "aws"
    assert record_in(line.replace(b',"cloud":"aws"', b"")).usage.cloud == ""


def test_attempts_survive_the_journal_unchanged() -> None:
    done = outcome(attempts=3)
    decided = record_in(to_line(record_of(done))).decisions
    assert tuple(attempt_of(row) for row in decided) == done.attempts


def test_an_estimate_without_end_stays_without_end() -> None:
    tried = attempt("q", 0)
    endless = Estimate("aws/one", math.inf, math.inf, math.inf, 0.0, 1, 0.0)
    done = replace(
        outcome("q"), attempts=(replace(tried, decision=replace(tried.decision, estimates=(endless,))),)
    )
    (row,) = record_in(to_line(record_of(done))).decisions
    assert attempt_of(row).decision.estimates == (endless,)


@given(
    texts=st.fixed_dictionaries({name: st.text() for name in ("request_id", "model", "error")}),
    seconds=st.fixed_dictionaries({name: st.none() | st.floats() for name in ("queue_s", "first_token_s")}),
    total_s=st.floats(),
    status=st.sampled_from(Status),
)
def test_whatever_came_from_outside_becomes_one_storable_line(
    texts: dict[str, str], seconds: dict[str, float | None], total_s: float, status: Status
) -> None:
    record = record_of(outcome(status=status, total_s=total_s, **texts, **seconds))
    line = to_line(record)
    assert line.count(b"\n") == 1
    assert from_line(line) == record
    for text in (record.usage.request_id, record.usage.model, record.usage.error):
        assert len(text) <= TEXT_LIMIT
        assert "\0" not in text
        text.encode()
    assert math.isfinite(record.usage.total_s)


@given(cut=st.integers(1, 200))
def test_half_a_line_is_never_taken_for_a_record(cut: int) -> None:
    line = to_line(record_of(outcome())).rstrip(b"\n")
    with pytest.raises(msgspec.MsgspecError):
        from_line(line[:-cut])


@given(text=st.text(), bad=st.booleans())
def test_an_event_is_one_line_and_comes_back_as_it_was(text: str, bad: bool) -> None:
    row = event_row("e1", Event(1.5, "state", "aws/one", text, bad=bad), "g1")
    line = to_line(row)
    assert line.count(b"\n") == 1
    assert from_line(line) == row
    assert (row.replica, event_of(row).bad, len(row.text) <= TEXT_LIMIT) == ("g1", bad, True)
    assert "\0" not in event_of(row).text


@pytest.mark.parametrize("line", [b"{}", b'{"decisions":[]}', b'{"event":{"id":"x"}}'])
def test_a_line_that_is_neither_a_query_nor_an_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        from_line(line)


def test_a_line_of_a_version_without_money_reads_as_not_priced() -> None:
    line = msgspec.json.decode(to_line(record_of(outcome())))
    for name in ("nano_usd", "cheapest_nano_usd", "dearest_nano_usd"):
        assert line["usage"].pop(name) == 0
    for row in line["decisions"]:
        for name in ("nano_usd", "cached_tokens", "resumed_tokens", "prices"):
            del row[name]
    found = record_in(msgspec.json.encode(line))
    assert found.usage.nano_usd is None
    assert attempt_of(found.decisions[0]).prices is None


def test_an_attempt_keeps_its_prices_and_its_cost() -> None:
    prices = Prices(0.2, 0.05, 0.6, 1e-7)
    paid = replace(attempt("q-1", 0), prices=prices, nano_usd=123, cached_tokens=4, resumed_tokens=2)
    row = record_in(to_line(record_of(replace(outcome(), attempts=(paid,))))).decisions[0]
    assert attempt_of(row) == paid
