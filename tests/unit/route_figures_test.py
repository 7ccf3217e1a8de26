"""What the page and Prometheus say of routes: an erring canary shows, and copies beside the answers."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from gateway.outcome import Outcome, Status
from gateway.routing.model_routes import ModelRoute, Shadow, Target
from gateway.telemetry.route_figures import WINDOW_S, Copied, RouteFigures, TargetFigures, merge_figures
from tests.support.fakes.store import outcome

ROUTES = {"chat": ModelRoute("chat", (Target("a", 95), Target("c", 5)), Shadow("s", 0.1))}


def routed(*ends: tuple[str, str], tokens: int = 10, total_s: float = 2.0) -> Outcome:
    """A query whose attempts were at these models and ended so; the last one answered if it finished."""
    ended = outcome("q")
    attempts = tuple(replace(ended.attempts[0], model=model, ended=end) for model, end in ends)
    status = Status.ANSWERED if ends[-1][1] == "finished" else Status.FAILED
    return replace(
        ended,
        model=ends[-1][0],
        asked_model="chat",
        attempts=attempts,
        status=status,
        completion_tokens=tokens,
        total_s=total_s,
    )


def figures() -> RouteFigures:
    here = RouteFigures()
    here.routes = lambda: ROUTES
    return here


def test_a_canary_that_errs_is_seen_although_its_users_were_answered() -> None:
    here = figures()
    for _ in range(18):
        here.observe(routed(("a", "finished")), 0.0)
    here.observe(routed(("c", "failed"), ("a", "finished"), tokens=30, total_s=4.0), 0.0)
    here.observe(routed(("c", "failed"), ("c", "lost")), 0.0)
    here.observe(replace(routed(("a", "finished")), asked_model=""), 0.0)
    a, c, shadow = merge_figures([here.view(1.0)])
    assert (a.model, a.queries, a.failed, a.tokens_p50, a.seconds_p50) == ("a", 19, 0, 10.0, 2.0)
    assert (c.model, c.queries, c.failed, c.tokens_p50) == ("c", 2, 2, None)
    assert (round(a.share + c.share, 3), c.share) == (1.0, round(2 / 21, 4))
    assert (shadow.is_shadow, shadow.queries) == (True, 0)
    text = scrape(here)
    assert 'mico_route_queries_total{model="c",result="failed",route="chat"} 2.0' in text
    assert 'mico_route_queries_total{model="a",result="ok",route="chat"} 19.0' in text


def test_the_page_forgets_what_is_old() -> None:
    here = figures()
    here.observe(routed(("a", "finished")), 0.0)
    assert here.view(WINDOW_S)[0].queries == 1
    assert here.view(WINDOW_S + 1)[0].queries == 0


def test_a_full_site_is_no_error_of_the_model() -> None:
    here = figures()
    here.observe(routed(("c", "full"), ("a", "finished")), 0.0)
    assert [each.failed for each in here.view(0.0)] == [0, 0, 0]


def test_copies_stand_beside_the_answers_that_they_copied() -> None:
    here = figures()
    for tokens in (10, 20, 90):
        here.observe_copy(Copied(0.0, "chat", "s", "answered", tokens, 3.0, 15, 1.0))
    here.observe_copy(Copied(0.0, "chat", "s", "failed"))
    here.observe_copy(Copied(0.0, "chat", "s", "skipped"))
    shadow = here.view(0.0)[-1]
    assert (shadow.queries, shadow.failed, shadow.skipped) == (4, 1, 1)
    assert (shadow.tokens_p50, shadow.user_tokens_p50) == (20.0, 15.0)
    assert (shadow.seconds_p50, shadow.user_seconds_p50) == (3.0, 1.0)
    text = scrape(here)
    assert 'mico_shadow_copies_total{model="s",result="skipped",route="chat"} 1.0' in text
    assert 'mico_shadow_tokens_total{answer="shadow",model="s",route="chat"} 120.0' in text
    assert 'mico_shadow_seconds_total{answer="user",model="s",route="chat"} 3.0' in text


def test_replicas_are_summed_and_medians_weighted() -> None:
    one = TargetFigures("chat", "a", queries=30, failed=1, tokens_p50=10.0, seconds_p50=1.0)
    other = TargetFigures("chat", "a", queries=10, failed=2, tokens_p50=50.0)
    canary = TargetFigures("chat", "c", queries=10)
    a, c = merge_figures([[one], [other, canary]])
    assert (a.queries, a.failed, a.tokens_p50, a.seconds_p50, a.share) == (40, 3, 20.0, 1.0, 0.8)
    assert c.share == 0.2


def test_what_is_counted_of_a_route_ends_with_it() -> None:
    here = figures()
    here.observe(routed(("a", "finished")), 0.0)
    here.observe_copy(Copied(0.0, "chat", "s", "answered", 1, 1.0, 1, 1.0))
    here.routes = dict
    assert 'route="chat"' not in scrape(here)
    here.routes = lambda: ROUTES
    assert 'route="chat"' not in scrape(here)


def scrape(here: RouteFigures) -> str:
    registry = CollectorRegistry()
    registry.register(here)
    return generate_latest(registry).decode()
