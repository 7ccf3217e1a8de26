"""A route's target follows from the query's id and the weights; the others stand in as they say, in order."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Model
from gateway.errors import BadRequest
from gateway.routing.model_routes import (
    ModelRoute,
    Prospect,
    Shadow,
    Target,
    When,
    check_route,
    draw,
    in_order,
    is_shadowed,
    may_name,
    route_models,
    stand_in,
)

A, B = Target("a"), Target("b", when=When.UNAVAILABLE)
CANARY = (Target("main", weight=95), Target("canary", weight=5))
IDS = [f"{number:032x}" for number in range(10_000)]


def test_a_canary_of_5_percent_gets_5_percent_of_10_000_queries() -> None:
    taken = Counter(in_order(CANARY, draw(query_id))[0].model for query_id in IDS)
    assert abs(taken["canary"] / len(IDS) - 0.05) <= 0.005
    assert taken.total() == len(IDS)


def test_a_shadow_of_5_percent_is_drawn_independently_of_the_target() -> None:
    copied = [query_id for query_id in IDS if is_shadowed(Shadow("s", 0.05), query_id)]
    assert abs(len(copied) / len(IDS) - 0.05) <= 0.005
    canaries = sum(in_order(CANARY, draw(each))[0].model == "canary" for each in copied)
    assert 0 < canaries < 0.15 * len(copied)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_every_target_with_a_weight_stands_in_once_and_none_without(
    weights: list[float], drawn: float
) -> None:
    targets = [Target(f"m{place}", weight) for place, weight in enumerate(weights)]
    order = in_order(targets, drawn)
    assert sorted(each.model for each in order) == sorted(each.model for each in targets if each.weight > 0)
    rest = order[1:]
    assert rest == [each for each in targets if each in rest], "the others keep the operator's order"


def test_a_fallback_is_never_drawn() -> None:
    assert {in_order((B, A), draw(each))[0] for each in IDS[:1000]} == {A}
    assert in_order((B,), 0.5) == [B], "unless a key may use nothing else"


@pytest.mark.parametrize(
    ("when", "here", "there", "moves"),
    [
        (When.OVERLOADED, Prospect(0.0, 9.0), Prospect(0.0, 0.1), False),
        (When.OVERLOADED, Prospect(0.5, 0.6), Prospect(0.0, 9.0), True),
        (When.OVERLOADED, Prospect(0.5, 0.6), Prospect(0.1, 0.2), False),
        (When.SLOWER_THAN, Prospect(0.0, 1.9), Prospect(0.0, 0.1), False),
        (When.SLOWER_THAN, Prospect(0.0, 2.1), Prospect(0.0, 0.1), True),
        (When.SLOWER_THAN, Prospect(0.0, 2.1), Prospect(0.0, 2.2), False),
        (When.UNAVAILABLE, Prospect(9.0, 9.0), Prospect(0.0, 0.1), False),
        (When.OVERLOADED, Prospect(inf, inf), Prospect(0.0, 0.1), False),
        (When.OVERLOADED, Prospect(0.5, 0.6), Prospect(inf, inf), False),
        (When.SLOWER_THAN, Prospect(0.0, 2.1), Prospect(inf, inf), False),
    ],
)
def test_a_target_stands_in_only_when_its_condition_holds_and_it_is_better(
    when: When, here: Prospect, there: Prospect, moves: bool
) -> None:
    other = Target("b", when=when, slower_than_s=2.0)
    found = stand_in("a", [other], {"a": here, "b": there}.__getitem__)
    assert (found is other) is moves


def test_targets_without_conditions_cost_no_estimate() -> None:
    def never(model: str) -> Prospect:
        raise AssertionError(model)

    assert stand_in("a", [B, Target("c")], never) is None


def test_what_a_route_is_listed_with() -> None:
    short = Model("a", "r1", 100, 7, "x", frozenset({"chat", "tools"}), max_prompt_chars=500)
    long = Model("b", "r2", 900, 8, "x", frozenset({"chat", "vision"}), max_prompt_chars=0)
    routes = {"r": ModelRoute("r", (A, B)), "gone": ModelRoute("gone", (Target("z"),))}
    (listed,) = route_models(routes, {"a": short, "b": long}).values()
    assert (listed.id, listed.owned_by, listed.context_tokens) == ("r", "route", 900)
    assert listed.features == {"chat", "tools", "vision"}
    assert listed.max_prompt_chars == 0, "unknown for one, so for the route"


def test_a_route_is_listed_for_whom_any_of_its_models_is() -> None:
    own = Model("a", "r1", 100, 7, "x", tenant="t")
    routes = {"mixed": ModelRoute("mixed", (A, B)), "own": ModelRoute("own", (A,))}
    listed = route_models(routes, {"a": own, "b": Model("b", "r2", 900, 8, "x")})
    assert (listed["mixed"].tenant, listed["own"].tenant) == ("", "t")


def test_the_name_of_a_route_opens_no_model() -> None:
    route = ModelRoute("a", (A, Target("b", weight=5)))
    assert may_name({"a"}.__contains__, route)
    assert not may_name({"r"}.__contains__, ModelRoute("r", (A,)))
    assert not may_name({"b"}.__contains__, route.without("b"))


def test_taking_out_a_model_leaves_the_others_and_ends_its_shadow() -> None:
    route = ModelRoute("r", CANARY, Shadow("canary", 0.1)).without("canary")
    assert [(each.model, each.weight) for each in route.targets] == [("main", 95), ("canary", 0)]
    assert route.shadow is None
    assert {in_order(route.targets, draw(each))[0].model for each in IDS[:1000]} == {"main"}


@pytest.mark.parametrize(
    ("route", "param"),
    [
        (ModelRoute("", (A,)), "name"),
        (ModelRoute("a\nb", (A,)), "name"),
        (ModelRoute("r" * 201, (A,)), "name"),
        (ModelRoute("r", ()), "targets"),
        (ModelRoute("r", (B,)), "targets"),
        (ModelRoute("r", (A, A)), "targets"),
        (ModelRoute("r", (Target("a", 0),)), "targets"),
        (ModelRoute("r", tuple(Target(f"m{n}") for n in range(17))), "targets"),
        (ModelRoute("r", (Target("a", -1),)), "targets[0].weight"),
        (ModelRoute("r", (Target("a", float("nan")),)), "targets[0].weight"),
        (ModelRoute("r", (A, Target("b", when=When.SLOWER_THAN))), "targets[1].slower_than_s"),
        (ModelRoute("r", (Target("a", slower_than_s=1.0),)), "targets[0].slower_than_s"),
        (ModelRoute("r", (A,), Shadow("s", 0.0)), "shadow.share"),
        (ModelRoute("r", (A,), Shadow("s", 1.01)), "shadow.share"),
        (ModelRoute("r", (Target("other"),)), "targets"),
        (ModelRoute("r", (A,), Shadow("other", 0.5)), "targets"),
        (ModelRoute("x", (A,)), "name"),
    ],
)
def test_a_route_that_cannot_be_is_refused_with_its_field(route: ModelRoute, param: str) -> None:
    others = [ModelRoute("other", (Target("x"),))]
    with pytest.raises(BadRequest) as refused:
        check_route(route, others)
    assert refused.value.param == param


def test_a_route_may_take_over_the_name_of_its_own_target() -> None:
    route = ModelRoute("a", (A, B), Shadow("s", 1.0))
    check_route(route, [route, ModelRoute("other", (Target("x"),))])
