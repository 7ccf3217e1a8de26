"""One page for all replicas: counts are summed, the worst waits hold, silent replicas are not counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.site_events import Event
from gateway.store.snapshots import ReplicaSummary
from gateway.telemetry.recent import ForecastQuality, Route, SiteWaits
from gateway.telemetry.replicas import FRESH_S, Summary, SummaryExchange, merge_summaries

WAITS = st.builds(SiteWaits, st.none() | st.floats(0, 60), st.none() | st.floats(0, 1), st.floats(0, 99))
SUMMARIES = st.builds(
    Summary,
    failed_per_min=st.integers(0, 99).map(float),
    ended_per_min=st.integers(0, 99).map(float),
    waits=st.dictionaries(st.sampled_from("abc"), WAITS),
    routes=st.lists(
        st.builds(Route, st.sampled_from(["why", "else"]), st.sampled_from("abc"), st.integers(1, 9))
    ),
    quality=st.none()
    | st.builds(
        ForecastQuality, st.just("m"), st.integers(1, 99), st.floats(0, 1), st.floats(0, 1), st.floats(0, 99)
    ),
)


class SummaryStore:
    """An in-memory store shared by all replicas of a test."""

    def __init__(self) -> None:
        self.rows: dict[str, ReplicaSummary] = {}
        self.away = False

    async def exchange(self, mine: ReplicaSummary) -> list[ReplicaSummary]:
        if self.away:
            raise OSError("away")
        self.rows[mine.replica] = ReplicaSummary(*msgspec.json.decode(msgspec.json.encode(mine)))
        return [row for name, row in self.rows.items() if name != mine.replica]


@given(st.lists(SUMMARIES, max_size=4))
def test_nothing_is_lost_and_nothing_counted_twice(summaries: list[Summary]) -> None:
    merged = merge_summaries(summaries)
    assert merged.ended_per_min == sum(each.ended_per_min for each in summaries)
    assert sum(r.attempts for r in merged.routes) == sum(r.attempts for s in summaries for r in s.routes)
    assert set(merged.waits) == {site for each in summaries for site in each.waits}
    for each in summaries:
        for site, waits in each.waits.items():
            assert (merged.waits[site].ttft_p95_s or 0) >= (waits.ttft_p95_s or 0)
    answers = sum(each.quality.answers for each in summaries if each.quality)
    assert (merged.quality.answers if merged.quality else 0) == answers


@given(SUMMARIES)
def test_one_replica_alone_says_what_it_said(summary: Summary) -> None:
    merged = merge_summaries([summary])
    assert (merged.failed_per_min, merged.waits) == (summary.failed_per_min, summary.waits)


def test_two_replicas_know_of_each_other_until_one_is_silent() -> None:
    store, now = SummaryStore(), [0.0]
    moved: list[str] = []
    move = Event(5.0, "offload", "b", "took 1 query")
    own = {"g1": Summary(ended_per_min=3.0), "g2": Summary(ended_per_min=4.0, moves=[move])}

    def exchange_of(name: str) -> SummaryExchange:
        return SummaryExchange(
            store,
            name,
            lambda: own[name],
            lambda event: moved.append(f"{name}: {event.text}"),
            clock=lambda: now[0],
            unix_time=lambda: now[0] + (1000.0 if name == "g2" else 0.0),  # its clock is ahead
        )

    async def scenario() -> None:
        one, two = exchange_of("g1"), exchange_of("g2")
        await two.exchange()
        for _ in range(2):
            await one.exchange()
        assert one.summaries == {"g2": own["g2"]}
        assert moved == ["g1: took 1 query"]
        now[0] = 4.0
        own["g2"] = replace(own["g2"], moves=[move, replace(move, at=6.0, text="took 2 queries")])
        await two.exchange()
        await one.exchange()
        assert two.summaries == {"g1": own["g1"]}
        assert moved[1:] == ["g1: took 2 queries"]
        now[0] = 4.0 + FRESH_S + 0.1
        await one.exchange()
        assert one.summaries == {}
        del store.rows["g2"]
        await one.exchange()
        assert not one._seen
        assert not one._last_move_at

    asyncio.run(scenario())
