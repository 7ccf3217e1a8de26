"""Samples of the plots: bounded, with gaps for unmeasured values, equal as rows and as columns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import SiteIdentity
from gateway.federation.directory import Directory
from gateway.telemetry.history import (
    MINUTES_KEPT,
    PLOTTED_SITES,
    SECONDS_KEPT,
    History,
    Sample,
    columns,
    fold,
)
from gateway.telemetry.publisher import SnapshotPublisher

figure = st.none() | st.floats(0, 1e6)
samples = st.lists(
    st.builds(
        Sample,
        at=st.floats(1e9, 2e9),
        output_per_s=st.floats(0, 1e6),
        ttft_p95_s=figure,
        headroom=figure,
        clouds=st.dictionaries(st.sampled_from("ab"), st.floats(0, 1e6)),
        load=st.dictionaries(st.sampled_from("xyz"), st.floats(0, 20)),
    ),
    min_size=1,
    max_size=20,
)


def test_both_windows_are_bounded_and_minutes_are_handed_on_once() -> None:
    kept: list[int] = []
    history = History(lambda minute, sample: kept.append(minute))
    for second in range(26 * 3600):
        if second % 7 == 0 or second > 26 * 3600 - 1000:
            history.add(Sample(at=float(second), output_per_s=2.0))
    assert len(history.seconds()) == SECONDS_KEPT
    assert len(history.minutes()) == MINUTES_KEPT + 1  # the last one is not over yet
    assert kept == list(range(26 * 60 - 1))
    assert {sample.output_per_s for sample in history.minutes()} == {2.0}


def test_what_an_earlier_process_kept_comes_before_what_is_new() -> None:
    history = History()
    history.add(Sample(at=600.0))
    history.restore([Sample(at=480.0), Sample(at=540.0)])
    assert [sample.at for sample in history.minutes()] == [480.0, 540.0, 600.0]
    assert [sample.at for sample in history.minutes(since=500.0)] == [540.0, 600.0]


def test_samples_of_a_clock_that_was_set_back_since_go() -> None:
    history = History()
    history.restore([Sample(at=540.0), Sample(at=9_000.0)])  # the clock was set back before the start, too
    for at in (600.0, 601.0, 660.0, 661.0, 4_200.0, 4_260.0, 662.0, 663.0):
        history.add(Sample(at=at))
    assert [sample.at for sample in history.seconds()] == [600.0, 601.0, 660.0, 661.0, 662.0, 663.0]
    assert [sample.at for sample in history.minutes()] == [540.0, 600.0, 660.0]


@given(samples)
def test_a_minute_lies_between_its_seconds_and_keeps_its_worst(seconds: list[Sample]) -> None:
    minute = fold(seconds, 60.0)
    rates = [sample.output_per_s for sample in seconds]
    assert min(rates) - 1e-3 <= minute.output_per_s <= max(rates) + 1e-3
    waits = [sample.ttft_p95_s for sample in seconds if sample.ttft_p95_s is not None]
    assert minute.ttft_p95_s == (round(max(waits), 4) if waits else None)
    for site, load in minute.load.items():
        assert load == max(sample.load[site] for sample in seconds if site in sample.load)


@given(samples)
def test_columns_say_what_the_samples_say(kept: list[Sample]) -> None:
    laid_out = columns(kept)
    for i, sample in enumerate(kept):
        assert laid_out["at"][i] == sample.at
        assert laid_out["headroom"][i] == sample.headroom
        assert {name: values[i] for name, values in laid_out["load"].items() if values[i] is not None} == (
            sample.load
        )
    assert all(len(values) == len(kept) for values in laid_out["clouds"].values())


def test_a_site_that_is_paid_by_the_hour_is_marked_once_a_minute_when_it_is_first_seen() -> None:
    """Not at the minute's end: what a site answers in its first minute would cost more than its hours."""

    async def main() -> None:
        now, directory = [600.0], Directory()
        marked: list[tuple[int, list[str]]] = []

        async def mark(minute: int, sites: Sequence[SiteIdentity]) -> None:
            marked.append((minute, [site.name for site in sites]))

        def join(name: str, usd_per_hour: float) -> None:
            identity = SiteIdentity(name, "b", "c", "r", {}, 1, 100, usd_per_hour=usd_per_hour)
            directory.join(identity, now[0])

        for name, usd_per_hour in (("own", 3.0), ("gone", 3.0), ("provider", 0.0)):
            join(name, usd_per_hour)
        directory.leave("gone")
        publisher = SnapshotPublisher(
            directory, "g1", clock=lambda: now[0], unix_time=lambda: now[0], mark_paid=mark
        )
        publisher.tick()
        join("late", 2.0)
        for now[0] in (630.0, 640.0, 660.0):
            publisher.tick()
            directory.leave("late")
        await asyncio.gather(*publisher.saving)
        assert marked == [(10, ["own"]), (10, ["late"]), (11, ["own"])]

    asyncio.run(main())


def test_a_plot_has_the_busiest_sites_of_a_day_in_which_thousands_came_and_went() -> None:
    kept = [
        Sample(at=60.0 * minute, load={f"spot-{minute}-{n}": n / 10 for n in range(10)} | {"stays": 0.95})
        for minute in range(MINUTES_KEPT)
    ]
    found = columns(kept)
    assert len(found["load"]) == PLOTTED_SITES
    assert found["load"]["stays"] == [0.95] * MINUTES_KEPT
    assert all(name == "stays" or name.endswith("-9") for name in found["load"])


def test_a_minute_has_no_more_sites_than_a_second() -> None:
    """Else a day of minutes holds every site of a large fleet: each is busy now and then."""
    folded: list[Sample] = []
    history = History(lambda _, sample: folded.append(sample))
    for second in range(61):
        busiest = {f"site-{second}-{number}": 0.9 - number / 1_000 for number in range(PLOTTED_SITES)}
        history.add(Sample(at=float(second), load=busiest))
    assert len(folded[0].load) == PLOTTED_SITES
    assert folded[0].load["site-7-0"] == 0.9
