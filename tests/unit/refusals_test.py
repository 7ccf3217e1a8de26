"""Which absent sites are waited for on behalf of a query."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from gateway.domain import Caller, Lane, LoadReport, Model, Query, Sampling, Site, SiteIdentity, SiteState
from gateway.failure import AttemptFailure, FailureCause
from gateway.query.refusals import MAX_AWAY_S, able_is_away, may_come_back

NOW_S = 10_000.0
TOO_LONG = AttemptFailure("here", FailureCause.CONTEXT_LENGTH, "too long")


def site(state: SiteState, received_s: float = NOW_S) -> Site:
    models = {"m": Model("m", "r", 9_000, 0, "mico")}
    identity = SiteIdentity("far", "boot", "aws", "us", models, 8, 10_000)
    return Site(identity, state, LoadReport(1, received_s))


def query(regions: Collection[str] | None = None, lane: Lane = Lane.INTERACTIVE) -> Query:
    caller = Caller("key-1", "tenant-1", regions=None if regions is None else frozenset(regions))
    return Query("q", "m", "hi", Sampling(), caller, 0.0, 1.0, lane=lane)


@pytest.mark.parametrize(("regions", "waits"), [(None, True), ({"us"}, True), ({"eu"}, False)])
def test_a_site_where_the_key_may_not_go_is_not_waited_for(
    regions: Collection[str] | None, waits: bool
) -> None:
    down = [site(SiteState.DOWN)]
    assert may_come_back(query(regions), (), down, NOW_S) == waits
    assert able_is_away(query(regions), TOO_LONG, 2_000, down, NOW_S) == waits


def test_a_line_of_a_batch_waits_longer_than_a_client() -> None:
    gone = [site(SiteState.DOWN, NOW_S - MAX_AWAY_S[Lane.INTERACTIVE] - 1)]
    assert not may_come_back(query(), (), gone, NOW_S)
    assert may_come_back(query(lane=Lane.BATCH), (), gone, NOW_S)
    assert not may_come_back(query(lane=Lane.BATCH), (), gone, NOW_S + MAX_AWAY_S[Lane.BATCH])


def test_a_silent_site_with_a_longer_context_may_take_the_prompt_later() -> None:
    assert able_is_away(query(), TOO_LONG, 2_000, [site(SiteState.READY, NOW_S - 100)], NOW_S)
    assert not able_is_away(query(), TOO_LONG, 2_000, [site(SiteState.READY)], NOW_S)
