"""Predicted effects of acts: remaining capacity, a load that does not fit, models that would be refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.admin.preview import preview, served
from gateway.domain import SiteState
from gateway.operator_orders import Action, Verb
from gateway.telemetry.snapshot import SiteView

A = SiteView(
    name="a",
    cloud="aws",
    region="us",
    pool="",
    certificate_until=None,
    state=SiteState.READY,
    models=["m"],
    model_count=1,
    asleep=0,
    own_bytes=0,
    pinned_off=[],
    slots=4,
    running=3,
    pending=2,
    outstanding_tokens=60,
    capacity_tokens=100,
    load=0.6,
    tokens_per_s=10.0,
    output_per_s=10.0,
    input_per_s=10.0,
    share=0.5,
    weight=100.0,
    kv_used=0.1,
    report_age_s=0.1,
    ttft_p95_s=0.1,
    itl_p95_s=0.01,
    errors_per_min=0.0,
    cached_share=None,
    input_usd_per_mtok=1.0,
    output_usd_per_mtok=2.0,
)
B = replace(A, name="b", models=["m", "n"], capacity_tokens=300, outstanding_tokens=100)


def test_a_drain_says_what_it_leaves_and_what_the_load_is() -> None:
    found = preview(Action(Verb.DRAIN, "a", ""), [A, B])
    assert (found.capacity_left, found.load, found.left, found.empty_in_s) == (0.75, 0.4, 5, 6.0)
    assert found.warnings == []
    assert [(s.site, s.before, s.after) for s in found.shares] == [("a", 0.25, 0.0), ("b", 0.75, 1.0)]


@pytest.mark.parametrize(
    ("verb", "state", "said"),
    [
        (Verb.DRAIN, SiteState.READY, "leaves 75% of today's capacity; current load is 40% of that."),
        (Verb.RESUME, SiteState.DRAINING, "gives 133% of today's capacity; current load is 33% of that."),
        (Verb.WEIGHT, SiteState.READY, "leaves capacity as it is; current load is 40% of it."),
    ],
)
def test_an_act_says_in_a_sentence_what_it_does_to_capacity(verb: Verb, state: SiteState, said: str) -> None:
    assert preview(Action(verb, "a", ""), [replace(A, state=state), B]).text == f"{verb.value} a {said}"


def test_a_load_that_does_not_fit_and_a_model_that_nobody_else_has_are_warned_of() -> None:
    found = preview(Action(Verb.DRAIN, "b", ""), [A, B])
    assert found.refused_models == ["n"]
    assert "No other site can serve n" in found.warnings[0]
    assert "40% does not fit into 25%" in found.warnings[1]


def test_a_thousand_models_that_nobody_else_has_are_one_warning() -> None:
    many = replace(B, models=[f"m{number:03}" for number in range(1_000)])
    warning = preview(Action(Verb.DRAIN, "b", ""), [A, many]).warnings[0]
    assert warning.startswith("No other site can serve m000, m001, m002 and 997 more: their queries")


@pytest.mark.parametrize(
    ("verb", "state"),
    [(Verb.DRAIN, SiteState.DOWN), (Verb.RESUME, SiteState.DOWN), (Verb.RESUME, SiteState.READY)],
)
def test_what_changes_nothing_is_said_to_change_nothing(verb: Verb, state: SiteState) -> None:
    found = preview(Action(verb, "a", ""), [replace(A, state=state), B])
    assert found.capacity_left == 1.0
    assert all(share.before == share.after for share in found.shares)


@given(st.sampled_from(list(Verb)), st.floats(0, 100), st.lists(st.sampled_from(list(SiteState)), min_size=2))
def test_shares_are_parts_of_a_whole_and_no_act_serves_a_model_that_nobody_has(
    verb: Verb, weight: float, states: list[SiteState]
) -> None:
    sites = [replace(B, name=str(i), state=state) for i, state in enumerate(states)]
    found = preview(Action(verb, "0", "", weight=weight, model="n"), sites)
    for shares in ([s.before for s in found.shares], [s.after for s in found.shares]):
        assert sum(shares) == pytest.approx(1.0, abs=0.01) or sum(shares) == 0.0
    assert set(found.refused_models) <= served(sites) <= {"m", "n"}
