"""Aggregates of the last five minutes: failures, moves with their reasons, forecast quality."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.domain import SiteState
from gateway.ending import Ending
from gateway.federation.directory import Directory
from gateway.outcome import Status
from gateway.site_events import MAX_EVENTS, Event, EventLog
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.recent import MAX_QUERIES, WINDOW_S, ForecastQuality, Move, Recent, Route, is_failure
from predictor.forecast import Forecast
from tests.support import ended_queries
from tests.support.ended_queries import attempt

ANSWERED = replace(ended_queries.ANSWERED, forecast=Forecast((0, 100), (1.0,), "flat"))


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, False),
        ({"status": Status.FAILED}, True),
        ({"status": Status.CANCELLED}, False),
        ({"status": Status.REFUSED, "attempts": (attempt("a", "full"),)}, True),
        ({"status": Status.REFUSED, "attempts": ()}, True),
        ({"status": Status.REFUSED, "attempts": (), "forecast": None}, True),
        ({"status": Status.REFUSED, "attempts": (attempt("a", "context_length"),), "mistaken": True}, False),
        ({"status": Status.REFUSED, "attempts": (), "forecast": None, "mistaken": True}, False),
    ],
)
def test_a_clients_mistake_is_no_failure_of_ours(changes: dict[str, object], ours: bool) -> None:
    assert is_failure(replace(ANSWERED, **changes)) is ours  # type: ignore[arg-type]


def test_attempts_are_counted_by_reason_and_moves_by_pair() -> None:
    recent = Recent()
    moved = (attempt("a", "released"), attempt("b", "lost"), attempt("c"))
    for _ in range(3):
        recent.observe(replace(ANSWERED, attempts=moved), 10.0)
    assert set(recent.routes()) == {
        Route("earliest finish", "a", 3),
        Route("offloaded to an idle site", "b", 3),
        Route("moved after: lost", "c", 3),
    }
    expected = {(Move("offload", "a", "b", "released"), 3), (Move("failover", "b", "c", "lost"), 3)}
    assert set(recent.take_moves()) == expected
    assert recent.take_moves() == []
    assert recent.waits(10.0)["b"].errors_per_min == 3.0


def test_cached_prompt_tokens_of_finished_attempts_are_counted_while_they_are_recent() -> None:
    recent = Recent()
    for at, (site, ended, cached) in enumerate(
        [("a", "finished", 2), ("a", "finished", 3), ("a", "lost", 0), ("b", "finished", 0)]
    ):
        tried = replace(attempt(site, ended), cached_tokens=cached)
        recent.observe(replace(ANSWERED, attempts=(tried,)), 10.0 + at)
    counts = {site: (w.prompt_tokens, w.cached_tokens) for site, w in recent.waits(20.0).items()}
    assert counts == {"a": (10, 5), "b": (5, 0)}
    assert recent.waits(70.5)["a"].cached_tokens == 3


def test_forecasts_are_compared_with_answers_only() -> None:
    recent = Recent()
    assert recent.quality() is None
    for tokens in (10, 60, 95, 99):
        recent.observe(replace(ANSWERED, completion_tokens=tokens), 0.0)
    recent.observe(replace(ANSWERED, status=Status.CANCELLED, completion_tokens=1), 0.0)
    assert recent.quality() == ForecastQuality("flat", 4, 0.25, 0.5, 45)


@pytest.mark.parametrize(
    ("tokens", "reasons", "limit", "counts"),
    [
        (95, ("length",), 95, True),  # above its p90 of 90
        (80, ("length",), 80, False),  # it could not exceed that
        (80, ("length",), None, False),  # cut short by something else, it may have been longer
        (20, ("content_filter",), None, False),
        (20, ("stop",), 80, False),  # where those above 80 are left out, those below are, too
        (20, ("stop", "stop"), None, False),
    ],
)
def test_forecasts_are_compared_where_they_could_be_exceeded(
    tokens: int, reasons: tuple[str, ...], limit: int | None, counts: bool
) -> None:
    recent = Recent()
    ending = Ending(finish_reasons=reasons)
    recent.observe(replace(ANSWERED, completion_tokens=tokens, ending=ending, max_tokens=limit), 0.0)
    assert recent.quality() == (ForecastQuality("flat", 1, 0.0, 0.0, 45) if counts else None)


def test_what_is_old_or_too_much_is_forgotten() -> None:
    recent = Recent()
    for number in range(MAX_QUERIES + 10):
        recent.observe(ANSWERED, float(number) / 20)
    recent.forget(300.0 + 40.0)
    assert len(recent._ended) <= MAX_QUERIES
    assert min(each.at for each in recent._ended) >= 40.0
    assert len(recent._seconds) <= 300.0
    assert recent.routes() == [Route("earliest finish", "a", MAX_QUERIES + 10 - 40 * 20)]


def test_a_minute_counts_whatever_its_number_and_what_is_older_not() -> None:
    recent = Recent()
    lost = replace(ANSWERED, status=Status.FAILED, attempts=(attempt("a", "lost"),))
    for number in range(MAX_QUERIES + 1):
        recent.observe(ANSWERED, 100.0 + number / MAX_QUERIES)
    recent.observe(lost, 101.5)
    assert recent.ended_per_min(130.0) == MAX_QUERIES + 2
    assert recent.failed_per_min(130.0) == recent.waits(130.0)["a"].errors_per_min == 1.0
    assert recent.ended_per_min(170.0) == recent.failed_per_min(170.0) == 0.0


def test_a_clock_that_is_set_back_makes_no_minute_longer() -> None:
    async def main() -> None:
        passed_s, unix_time = [1_000.0], [2_000_000.0]
        publisher = SnapshotPublisher(
            Directory(), "g1", clock=lambda: passed_s[0], unix_time=lambda: unix_time[0] + passed_s[0]
        )
        publisher.observe(replace(ANSWERED, asked_model="chat"))
        unix_time[0] -= 3_600.0
        assert publisher.tick().routes
        passed_s[0] += 90.0
        publisher.tick()
        assert publisher.summary().ended_per_min == 0.0
        passed_s[0] += WINDOW_S
        latest = publisher.tick()
        assert not latest.routes and not latest.model_routes

    asyncio.run(main())


LOOKS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", ""]),
        st.sampled_from([Status.ANSWERED, Status.FAILED, Status.REFUSED]),
        st.one_of(st.none(), st.integers(0, 3)),  # seconds to the first token
        st.integers(0, 120),  # tokens
        st.sampled_from([0.0, 0.5, 30.0, 200.0]),  # seconds until the next
    ),
    max_size=60,
)


@settings(deadline=None)
@given(LOOKS)
def test_what_was_counted_as_it_came_and_went_is_what_counting_all_that_is_kept_finds(
    looks: list[tuple[str, Status, int | None, int, float]],
) -> None:
    recent, now = Recent(), 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gateway.telemetry.recent.MAX_QUERIES", 20)
        for site, status, first_s, tokens, rest_s in looks:
            attempts = (attempt(site, "lost" if status is Status.FAILED else "finished"),) if site else ()
            query = replace(ANSWERED, attempts=attempts, status=status, completion_tokens=tokens)
            recent.observe(replace(query, first_token_s=first_s), now)
            now += rest_s
            recent.forget(now)
            anew = Recent()
            anew._seconds = recent._seconds
            for each in recent._ended:
                anew._keep(each)
            assert recent.waits(now) == anew.waits(now)
            assert recent.quality() == anew.quality()
            counted = sum((second.routes for second in recent._seconds), Counter[tuple[str, str]]())
            assert {(r.reason, r.site): r.attempts for r in recent.routes()} == counted


def test_events_tell_of_changes_once() -> None:
    log = EventLog()
    kept = []
    for at, boot_id, state in (
        (1.0, "boot", SiteState.READY),
        (2.0, "boot", SiteState.READY),
        (3.0, "boot", SiteState.STALE),
        (4.0, "boot", SiteState.DOWN),
        (5.0, "again", SiteState.READY),
    ):
        kept += log.record_states(at, [("a", boot_id, state)], {"a": "silent for 5.0 s"})
    assert [event.text for event in kept] == [
        "joined",
        "is stale: its reports stopped",
        "is down: silent for 5.0 s",
        "joined again",
        "is ready",
    ]
    assert log.newest() == kept[:2:-1] + kept[2::-1]
    assert [event.at for event in log.newest(2)] == [5.0, 5.0]


def test_no_flood_of_acts_displaces_what_happened_to_sites() -> None:
    log = EventLog()
    down = [Event(float(number), "state", "a", "is down") for number in range(40)]
    acts = [Event(100.0 + number, "operator", "", "create key") for number in range(2 * MAX_EVENTS)]
    for event in (*acts[:5], *down, *acts[5:]):
        log.add(event)
    assert log.newest(60) == [*acts[:-31:-1], *down[:-31:-1]]
    assert log.newest(100) == [*acts[:-61:-1], *down[::-1]], "there are no others"
    assert len(log.newest()) == MAX_EVENTS
