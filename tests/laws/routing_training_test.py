"""Laws of deciding where sites train beside what they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Site
from gateway.routing.decide import decide
from gateway.routing.fleet import Fleet
from gateway.routing.policies import mico
from tests.laws.routing_test import DEMAND, NOW, loads, site
from tests.support.single_estimate import estimate


def trains(s: Site, added_s: float) -> Site:
    return replace(s, load=replace(s.load, training=1, training_s_per_iteration=added_s))


@given(loads, st.floats(0.0, 0.1))
def test_training_makes_a_site_look_later_by_what_it_adds_to_each_token(s: Site, added_s: float) -> None:
    alone, beside = estimate(DEMAND, s, NOW), estimate(DEMAND, trains(s, added_s), NOW)
    assert beside.wait_s >= alone.wait_s
    later_s = beside.finish_s - beside.first_token_s - (alone.finish_s - alone.first_token_s)
    assert later_s == pytest.approx(DEMAND.response_tokens * added_s, abs=1e-9)


def test_a_chat_leaves_a_site_that_trains_to_its_job_only_where_it_ends_sooner() -> None:
    busy = site("busy", running=(200,) * 8, pending=2)
    for other, wanted in ((site("free"), "free"), (busy, "trains")):
        placed = decide(DEMAND, Fleet.of([trains(site("trains"), 0.015), other]), mico, now_s=NOW, turn=0)
        assert placed.site is not None
        assert placed.site.name == wanted
