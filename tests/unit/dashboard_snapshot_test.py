"""Snapshots: rates from totals, stale as a state, one sentence about the federation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from gateway.device import DeviceLoad
from gateway.domain import IterationCost, LoadReport, Model, ModelState, Site, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.telemetry.banner import banner
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.recent import SiteWaits
from gateway.telemetry.snapshot import Rate, Rates, SiteView, SiteViews, Snapshot, headroom, totals

IDENTITY = SiteIdentity("a", "boot", "aws", "us", {}, slots=4, kv_capacity_tokens=100)


def site(name: str = "a", state: SiteState = SiteState.READY, **load: float) -> Site:
    figures = {"seq": 1, "received_s": 100.0, "kv_free_tokens": 100, "tokens_per_s": 10.0, **load}
    return Site(replace(IDENTITY, name=name), state, LoadReport(**figures))  # type: ignore[arg-type]


def shown(*sites: Site, now_s: float = 100.0) -> list[SiteView]:
    return SiteViews().build(
        sites, {s.name: Rate(1.0, 1.0) for s in sites}, {"a": SiteWaits(0.5, 0.01, 0.0)}, now_s
    )


def test_a_site_shows_its_devices() -> None:
    device = DeviceLoad("cuda:0", False, 4, 1, 2, 100, 50, 9.5, 3, 1)
    (shown_site,) = shown(replace(site(), load=replace(site().load, devices=(device,))))
    assert shown_site.devices == [device]
    assert shown(site())[0].devices == []


def test_a_site_shows_the_jobs_that_it_trains_while_it_lives() -> None:
    assert [
        shown(site(state=state, training=2))[0].training for state in (SiteState.READY, SiteState.DOWN)
    ] == [2, 0]
    assert shown(site())[0].training == 0


def test_rates_are_differences_of_the_sites_own_totals() -> None:
    rates = Rates()
    for second in range(10):
        found = rates.observe([site(tokens_total=50 * second, prompt_tokens_total=7 * second)], float(second))
    assert found["a"] == Rate(50.0, 7.0)


def test_a_restarted_site_never_shows_a_negative_rate() -> None:
    rates = Rates()
    rates.observe([site(tokens_total=1000)], 0.0)
    assert rates.observe([site(tokens_total=5)], 1.0)["a"] == Rate(0.0, 0.0)
    reborn = site(tokens_total=2000)
    reborn = replace(reborn, identity=replace(reborn.identity, boot_id="next"))
    assert rates.observe([reborn], 2.0)["a"] == Rate(0.0, 0.0)


def test_rates_forget_sites_that_are_listed_no_more() -> None:
    rates = Rates()
    rates.observe([site("a"), site("b")], 0.0)
    rates.observe([site("b")], 1.0)
    assert set(rates._seen) == {"b"}


def test_silence_is_a_state_of_its_own_but_not_louder_than_down() -> None:
    assert shown(site(), now_s=101.9)[0].state is SiteState.READY
    assert shown(site(), now_s=102.1)[0].state is SiteState.STALE
    assert shown(site(state=SiteState.DOWN), now_s=200.0)[0].state is SiteState.DOWN


def test_capacity_is_that_of_a_full_site_and_unknown_is_not_zero() -> None:
    cost = IterationCost(base_s=0.1)
    full = shown(replace(site(), load=replace(site().load, iteration=cost, token_load=100.0)))[0]
    assert (full.capacity_tokens, full.load) == (400, 0.25)
    assert shown(site(tokens_per_s=0.0))[0].load is None
    assert headroom(shown(site(tokens_per_s=0.0))) is None


def test_headroom_counts_only_sites_that_take_work() -> None:
    drained = site("b", SiteState.DRAINING, token_load=90.0)
    assert headroom(shown(site(token_load=25.0), drained)) == 0.75
    assert headroom(shown(drained)) is None


SERVING = msgspec.structs.replace(shown(site())[0], models=["m"])


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "calm", "All well: 1 site ready"),
        (
            {"load": 0.95, "pending": 7},
            "degraded",
            "a at 95% of token capacity, 7 queued; worked off in 10 s",
        ),
        ({"state": SiteState.DRAINING, "running": 2}, "critical", "no site can serve m"),
        ({"state": SiteState.DRAINING, "running": 2}, "critical", "a draining, 2 left, empty in about 0 s."),
        ({"state": SiteState.PAUSED, "running": 2, "load": 0.61}, "critical", "2 left, empty in about 6 s."),
        ({"state": SiteState.DRAINING, "running": 0, "pending": 0}, "critical", "a draining, empty."),
        ({"pinned_off": ["m"]}, "critical", "no site can serve m"),
        ({"weight": 0.0}, "critical", "no site can serve m"),
        ({"state": SiteState.STALE, "report_age_s": 3.2}, "critical", "a stale, silent for 3 s."),
        ({"state": SiteState.DOWN, "report_age_s": 1260.0}, "critical", "a down, silent for 21 min."),
    ],
)
def test_the_banner_says_what_is_wrong_and_where(changes: dict[str, object], level: str, words: str) -> None:
    sites = [msgspec.structs.replace(SERVING, **changes)]  # type: ignore[arg-type]
    said = banner(sites, totals(sites, 0.0, 0.0))
    assert said.level == level
    assert words in said.text


def test_the_banner_names_three_of_a_thousand_models_and_still_says_which_site_is_down() -> None:
    lost = msgspec.structs.replace(
        SERVING, state=SiteState.DOWN, report_age_s=5.0, models=[f"m{number:03}" for number in range(1_000)]
    )
    assert banner([lost], totals([lost], 0.0, 0.0)).text == (
        "Critical: no site can serve m000, m001, m002 and 997 more: their queries are refused. "
        "a down, silent for 5 s."
    )


def test_the_banner_says_what_room_is_left() -> None:
    sites = [SERVING, msgspec.structs.replace(SERVING, name="b", state=SiteState.DOWN, report_age_s=5.0)]
    known = replace(totals(sites, 0.0, 0.0), headroom=0.41)
    assert (
        banner(sites, known).text
        == "Degraded: b down, silent for 5 s. 41% of the remaining capacity is free."
    )


@pytest.mark.parametrize(("failed", "level"), [(0.0, "calm"), (2.0, "degraded"), (10.0, "critical")])
def test_errors_are_judged_by_their_share(failed: float, level: str) -> None:
    assert banner([SERVING], totals([SERVING], failed, 100.0)).level == level


def test_no_site_at_all_is_critical() -> None:
    assert banner([], totals([], 0.0, 0.0)).text == "Critical: no site has joined, so every query is refused."


def test_a_site_shows_its_pool_and_until_when_its_certificate_is_good() -> None:
    pooled = replace(site(), identity=replace(IDENTITY, pool="aws-us"))
    rates = {"a": Rate(1.0, 1.0)}
    (seen,) = SiteViews().build([pooled], rates, {}, 100.0, {"a": 5e9}.__getitem__)
    assert (seen.pool, seen.certificate_until) == ("aws-us", 5e9)
    assert SiteViews().build([pooled], rates, {}, 100.0)[0].certificate_until is None


def test_models_that_sleep_or_wake_are_counted_and_the_memory_of_the_others() -> None:
    states = {"m": ModelState.READY, "v": ModelState.SLEEPING, "w": ModelState.WAKING}
    models = {
        name: Model(name, "r", 100, 0, "test", state=state, own_bytes=size)
        for size, (name, state) in enumerate((*states.items(), ("x", ModelState.READY)), start=10)
    }
    one = site()
    (found,) = shown(replace(one, identity=replace(one.identity, models=models)))
    assert (found.models, found.asleep) == (["m", "v", "w", "x"], 2)
    assert found.own_bytes == 10 + 13


def test_a_streamed_snapshot_counts_the_models_of_a_site_and_names_none_of_them() -> None:
    """A thousand adapters at each of fifty sites were a megabyte a second for every open page."""
    names = [f"ft:base:acme:support:{number:08}" for number in range(1_000)]
    models = {name: Model(name, "1", 8192, 0, "acme") for name in names}
    directory = Directory()
    for number in range(50):
        directory.join(replace(IDENTITY, name=f"site-{number}", models=models), 0.0)
    publisher = SnapshotPublisher(directory, "here", clock=lambda: 1.0)

    async def published() -> Snapshot:
        return publisher.tick()

    snapshot = asyncio.run(published())
    assert {site.model_count for site in snapshot.sites} == {1_000}
    assert snapshot.sites[0].models == names
    assert names[-1].encode() not in publisher.encoded


def test_a_view_kept_of_an_unchanged_site_equals_one_built_anew() -> None:
    kept = SiteViews()
    busy = site("b", running=2, token_load=25.0)
    moments = [
        ([site(), busy], 1.0, 0.0, 100.0),
        ([site(), busy], 1.0, 0.0, 101.5),
        ([site(), busy], 1.0, 0.0, 103.0),  # both are stale
        ([site(), site("b", running=3, received_s=103.0)], 2.0, 0.0, 103.5),
        ([replace(site(), weight=0.5), busy], 2.0, 0.1, 104.0),
        ([site("b")], 2.0, 0.1, 105.0),
        ([site("a"), site("b")], 2.0, 0.1, 106.0),
    ]
    for sites, output_per_s, errors_per_min, now_s in moments:
        rates = {"a": Rate(1.0, 1.0), "b": Rate(output_per_s, 0.0)}
        given = rates, {"a": SiteWaits(0.5, 0.01, errors_per_min)}, now_s, lambda _, s=now_s: s - 103.0
        assert kept.build(sites, *given) == SiteViews().build(sites, *given)
    assert set(kept._seen) == {"a", "b"}
    assert kept.build([], {}, {}, 107.0) == [] and not kept._seen
