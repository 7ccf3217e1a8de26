"""Count the queries of model routes by target: errors, lengths and times, and copies beside the answers.

The counts are of the last WINDOW_S for the page, of all time for Prometheus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.outcome import Outcome, Status
from gateway.routing.model_routes import ModelRoute

WINDOW_S: Final = 300.0
SHADOW_WINDOW_S: Final = 3600.0
MAX_QUERIES: Final = 2_000
MAX_COPIES: Final = 500
MAX_SHOWN: Final = 100
BROKEN: Final = ("lost", "failed")
"""How an attempt ends that its site is to blame for."""


class Routed(NamedTuple):
    """The result of a query at a target. `at` is monotonic; unanswered, `tokens` and `seconds` are 0."""

    at: float
    route: str
    model: str
    failed: bool
    answered: bool
    tokens: int
    seconds: float


class Copied(NamedTuple):
    """A copied query, beside the user's. `result` is answered, failed or skipped: the site had no room."""

    at: float
    route: str
    model: str
    result: str
    tokens: int = 0
    seconds: float = 0.0
    user_tokens: int = 0
    user_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """A target, or the shadow, of a route. Medians are None without an answer; of a shadow, those of the
    users' answers to the copied queries stand beside them. `share` is of the route's queries.
    """

    route: str
    model: str
    is_shadow: bool = False
    queries: int = 0
    failed: int = 0
    skipped: int = 0
    share: float = 0.0
    tokens_p50: float | None = None
    seconds_p50: float | None = None
    user_tokens_p50: float | None = None
    user_seconds_p50: float | None = None


class RouteFigures(Collector):
    """Counts queries and copies by route. Counts of a route that `routes` returns no more go at a scrape."""

    def __init__(self) -> None:
        self.routes: Callable[[], Mapping[str, ModelRoute]] = dict
        self._routed: deque[Routed] = deque(maxlen=MAX_QUERIES)
        self._copied: deque[Copied] = deque(maxlen=MAX_COPIES)
        self._queries: Counter[tuple[str, str, str]] = Counter()  # by route, model and result
        self._copies: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[tuple[str, str, str]] = Counter()  # of copied queries, by whose answer
        self._seconds: dict[tuple[str, str, str], float] = {}

    def observe(self, outcome: Outcome, at: float) -> None:
        """Count a query that came by a route, once for each target that had it."""
        route = outcome.asked_model
        if not route:
            return
        for model in dict.fromkeys(attempt.model for attempt in outcome.attempts):
            ended = [attempt.ended for attempt in outcome.attempts if attempt.model == model]
            failed = any(each in BROKEN for each in ended)
            answered = outcome.status is Status.ANSWERED and model == outcome.model
            tokens, seconds = (outcome.completion_tokens, outcome.total_s) if answered else (0, 0.0)
            self._routed.append(Routed(at, route, model, failed, answered, tokens, seconds))
            self._queries[route, model, "failed" if failed else "ok"] += 1

    def observe_copy(self, copy: Copied) -> None:
        self._copied.append(copy)
        self._copies[copy.route, copy.model, copy.result] += 1
        if copy.result != "answered":
            return
        figures = {"shadow": (copy.tokens, copy.seconds), "user": (copy.user_tokens, copy.user_seconds)}
        for whose, (tokens, seconds) in figures.items():
            key = copy.route, copy.model, whose
            self._tokens[key] += tokens
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def view(self, now: float) -> list[TargetFigures]:
        """Return the figures of this replica, by route; also of targets that had no query."""
        while self._routed and self._routed[0].at < now - WINDOW_S:
            self._routed.popleft()
        while self._copied and self._copied[0].at < now - SHADOW_WINDOW_S:
            self._copied.popleft()
        of_target: dict[tuple[str, str], list[Routed]] = {}
        of_shadow: dict[tuple[str, str], list[Copied]] = {}
        for route in self.routes().values():
            of_target.update(((route.name, target.model), []) for target in route.targets)
            if route.shadow is not None:
                of_shadow[route.name, route.shadow.model] = []
        for query in self._routed:
            of_target.setdefault((query.route, query.model), []).append(query)
        for copy in self._copied:
            of_shadow.setdefault((copy.route, copy.model), []).append(copy)
        shown = [_target_figures(*key, queries) for key, queries in of_target.items()]
        return [*shown, *(_shadow_figures(*key, copies) for key, copies in of_shadow.items())][:MAX_SHOWN]

    def collect(self) -> Iterator[Metric]:
        """Yield the counters. Routes that are gone are left out, and forgotten."""
        known = self.routes()
        for counts in (self._queries, self._copies, self._tokens, self._seconds):
            for key in [key for key in counts if key[0] not in known]:
                del counts[key]
        for name, text, label, counts in (
            ("mico_route_queries", "Queries of a route by target", "result", self._queries),
            ("mico_shadow_copies", "Copies of queries to a shadow", "result", self._copies),
            ("mico_shadow_tokens", "Tokens of the answers to copied queries", "answer", self._tokens),
            ("mico_shadow_seconds", "Time of the answers to copied queries", "answer", self._seconds),
        ):
            family = CounterMetricFamily(name, text, labels=["route", "model", label])
            for key, count in counts.items():
                family.add_metric(key, count)
            yield family


def merge_figures(replicas: Sequence[Sequence[TargetFigures]]) -> list[TargetFigures]:
    """Sum the counts of all replicas; a median is their mean, weighted by their queries."""
    by_target: dict[tuple[str, bool, str], list[TargetFigures]] = {}
    for figures in replicas:
        for each in figures:
            by_target.setdefault((each.route, each.is_shadow, each.model), []).append(each)
    queries: Counter[str] = Counter()
    for each in (each for found in by_target.values() for each in found if not each.is_shadow):
        queries[each.route] += each.queries
    merged = [_merge(found, queries[route]) for (route, _, _), found in by_target.items()]
    return sorted(merged, key=lambda each: (each.route, each.is_shadow))[:MAX_SHOWN]


def _merge(found: Sequence[TargetFigures], of_route: int) -> TargetFigures:
    queries = sum(each.queries for each in found)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [
            (value, each.queries) for value, each in zip(values, found, strict=True) if value is not None
        ]
        weight = sum(count for _, count in known)
        return round(sum(value * count for value, count in known) / weight, 4) if weight else None

    return TargetFigures(
        route=found[0].route,
        model=found[0].model,
        is_shadow=found[0].is_shadow,
        queries=queries,
        failed=sum(each.failed for each in found),
        skipped=sum(each.skipped for each in found),
        share=round(queries / of_route, 4) if of_route else 0.0,
        tokens_p50=mean([each.tokens_p50 for each in found]),
        seconds_p50=mean([each.seconds_p50 for each in found]),
        user_tokens_p50=mean([each.user_tokens_p50 for each in found]),
        user_seconds_p50=mean([each.user_seconds_p50 for each in found]),
    )


def _target_figures(route: str, model: str, queries: Sequence[Routed]) -> TargetFigures:
    answered = [each for each in queries if each.answered]
    return TargetFigures(
        route,
        model,
        queries=len(queries),
        failed=sum(each.failed for each in queries),
        tokens_p50=_p50([each.tokens for each in answered]),
        seconds_p50=_p50([each.seconds for each in answered]),
    )


def _shadow_figures(route: str, model: str, copies: Sequence[Copied]) -> TargetFigures:
    answered = [each for each in copies if each.result == "answered"]
    return TargetFigures(
        route,
        model,
        is_shadow=True,
        queries=sum(each.result != "skipped" for each in copies),
        failed=sum(each.result == "failed" for each in copies),
        skipped=sum(each.result == "skipped" for each in copies),
        tokens_p50=_p50([each.tokens for each in answered]),
        seconds_p50=_p50([each.seconds for each in answered]),
        user_tokens_p50=_p50([each.user_tokens for each in answered]),
        user_seconds_p50=_p50([each.user_seconds for each in answered]),
    )


def _p50(values: Sequence[float]) -> float | None:
    return round(float(median(values)), 4) if values else None
