"""Aggregate this replica's queries of the last five minutes: waits, errors, routes and forecast quality.

Does not include other replicas' queries (see replicas.py) or sites without queries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from gateway.outcome import Attempt, Outcome, Status

WINDOW_S = 300.0
ERRORS_WINDOW_S = 60.0
MAX_QUERIES = 2_000
"""Number of queries whose times and forecasts are kept."""


class EndedQuery(NamedTuple):
    """The figures of one query that ended.

    `at` is monotonic; `forecast` is (source, p50, p90, actual tokens).
    """

    at: float
    site: str
    ttft_s: float | None
    itl_s: float | None
    forecast: tuple[str, int, int, int] | None


@dataclass(slots=True)
class Second:
    """Counts of the queries that ended within one second of monotonic time."""

    at: int
    ended: int = 0
    failed: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    routes: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)  # prompt tokens of finished attempts, by site
    cached: Counter[str] = field(default_factory=Counter)  # of these


@dataclass(frozen=True, slots=True)
class SiteWaits:
    """95th percentiles of a site's waits; None where there were no queries. Of the prompt tokens of the
    last minute, those that it had in its cache.
    """

    ttft_p95_s: float | None
    itl_p95_s: float | None
    errors_per_min: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


NO_WAITS = SiteWaits(None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Route:
    """Number of attempts that went to `site` for `reason`."""

    reason: str
    site: str
    attempts: int


@dataclass(frozen=True, slots=True)
class ForecastQuality:
    """Forecasts against answers. Well calibrated: half of the answers under p50, nine tenths under p90. Those
    whose own limit is no longer than their p90 are left out: they could not exceed it.
    """

    source: str
    answers: int
    under_p50: float
    under_p90: float
    error_p50_tokens: float


class Move(NamedTuple):
    """A query that moved from `donor` to `taker`. `kind` is "offload" or "failover"."""

    kind: str
    donor: str
    taker: str
    why: str


class SortedValues:
    """Values kept in order: sorting them for every snapshot would block the event loop."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        insort(self._values, value)

    def drop(self, value: float) -> None:
        del self._values[bisect_left(self._values, value)]

    def quantile(self, share: float) -> float | None:
        values = self._values
        return values[min(len(values) - 1, int(share * len(values)))] if values else None


class SortedValuesBySite:
    """Sorted values by site. Forgets a site that has no values left."""

    def __init__(self) -> None:
        self.by_site: dict[str, SortedValues] = {}

    def add(self, site: str, value: float | None) -> None:
        if value is not None:
            self.by_site.setdefault(site, SortedValues()).add(value)

    def drop(self, site: str, value: float | None) -> None:
        if value is not None:
            self.by_site[site].drop(value)
            if not self.by_site[site]:
                del self.by_site[site]

    def p95(self, site: str) -> float | None:
        found = self.by_site[site].quantile(0.95) if site in self.by_site else None
        return None if found is None else round(found, 4)


class Recent:
    """Aggregates that are updated as queries enter and leave the window."""

    def __init__(self) -> None:
        self._ended: deque[EndedQuery] = deque()
        self._ttft = SortedValuesBySite()
        self._itl = SortedValuesBySite()
        self._errors_p50 = SortedValues()
        self._under: Counter[str] = Counter()
        self._seconds: deque[Second] = deque()
        self._routes: Counter[tuple[str, str]] = Counter()
        self._moves: Counter[Move] = Counter()

    def observe(self, outcome: Outcome, at: float) -> None:
        """Add a query that ended at `at`, in monotonic seconds."""
        if len(self._ended) == MAX_QUERIES:
            self._drop()
        self._keep(ended_query(outcome, at))
        if not self._seconds or self._seconds[-1].at != int(at):
            self._seconds.append(Second(int(at)))
        second = self._seconds[-1]
        second.ended += 1
        second.failed += is_failure(outcome)
        for kind, attempt in zip(route_reasons(outcome.attempts), outcome.attempts, strict=True):
            second.routes[kind, attempt.decision.site] += 1
            self._routes[kind, attempt.decision.site] += 1
            if attempt.ended in ("lost", "failed"):
                second.broken[attempt.decision.site] += 1
            elif attempt.ended == "finished":
                second.prompts[attempt.decision.site] += attempt.prompt_tokens
                second.cached[attempt.decision.site] += attempt.cached_tokens
        if len(outcome.attempts) > 1:
            self._moves.update(moves(outcome.attempts))

    def _keep(self, query: EndedQuery) -> None:
        self._ended.append(query)
        self._ttft.add(query.site, query.ttft_s)
        self._itl.add(query.site, query.itl_s)
        if query.forecast is not None:
            _, p50, p90, actual = query.forecast
            self._errors_p50.add(abs(p50 - actual))
            self._under["p50"] += actual <= p50
            self._under["p90"] += actual <= p90

    def _drop(self) -> None:
        """Remove the oldest query."""
        query = self._ended.popleft()
        self._ttft.drop(query.site, query.ttft_s)
        self._itl.drop(query.site, query.itl_s)
        if query.forecast is not None:
            _, p50, p90, actual = query.forecast
            self._errors_p50.drop(abs(p50 - actual))
            self._under["p50"] -= actual <= p50
            self._under["p90"] -= actual <= p90

    def take_moves(self) -> list[tuple[Move, int]]:
        """Return the moves since the last call, each with its count, the most frequent first."""
        taken, self._moves = self._moves, Counter()
        return taken.most_common(20)

    def forget(self, now: float) -> None:
        """Remove all queries older than WINDOW_S."""
        while self._ended and self._ended[0].at < now - WINDOW_S:
            self._drop()
        while self._seconds and self._seconds[0].at < now - WINDOW_S:
            self._routes -= self._seconds.popleft().routes

    def waits(self, now: float) -> dict[str, SiteWaits]:
        """Return the waits of every site that had queries or errors."""
        broken, prompts, cached = Counter[str](), Counter[str](), Counter[str]()
        for second in self._last_minute(now):
            broken.update(second.broken)
            prompts.update(second.prompts)
            cached.update(second.cached)
        names = self._ttft.by_site.keys() | self._itl.by_site.keys() | broken.keys()
        return {
            name: SiteWaits(
                self._ttft.p95(name),
                self._itl.p95(name),
                float(broken[name]),
                prompts[name],
                cached[name],
            )
            for name in names
        }

    def failed_per_min(self, now: float) -> float:
        return float(sum(second.failed for second in self._last_minute(now)))

    def ended_per_min(self, now: float) -> float:
        return float(sum(second.ended for second in self._last_minute(now)))

    def _last_minute(self, now: float) -> list[Second]:
        return [second for second in self._seconds if second.at > now - ERRORS_WINDOW_S]

    def routes(self) -> list[Route]:
        return [Route(reason, site, number) for (reason, site), number in self._routes.most_common(12)]

    def quality(self) -> ForecastQuality | None:
        answers, error_p50 = len(self._errors_p50), self._errors_p50.quantile(0.5)
        newest = next((each.forecast for each in reversed(self._ended) if each.forecast is not None), None)
        if newest is None or error_p50 is None:
            return None
        return ForecastQuality(
            source=newest[0],
            answers=answers,
            under_p50=round(self._under["p50"] / answers, 3),
            under_p90=round(self._under["p90"] / answers, 3),
            error_p50_tokens=error_p50,
        )


def ended_query(outcome: Outcome, at: float) -> EndedQuery:
    """Reduce an outcome to the figures that are kept."""
    first_s, itl_s, forecast = outcome.first_token_s, None, None
    if first_s is not None and outcome.completion_tokens > 1:
        itl_s = (outcome.total_s - first_s) / (outcome.completion_tokens - 1)
    if outcome.tells_length and outcome.forecast is not None:
        _, p50, p90 = outcome.forecast.summary
        if outcome.max_tokens is None or p90 < outcome.max_tokens:  # or it could not be exceeded
            forecast = outcome.forecast.source, p50, p90, outcome.completion_tokens
    return EndedQuery(
        at=at,
        site=outcome.site,
        ttft_s=first_s,
        itl_s=itl_s,
        forecast=forecast,
    )


def is_failure(outcome: Outcome) -> bool:
    """Return whether a client saw a failure of ours: not its own mistake, quota or cancellation."""
    return outcome.status in (Status.FAILED, Status.REFUSED) and not outcome.mistaken


def route_reasons(attempts: Sequence[Attempt]) -> list[str]:
    """Return the reason of each attempt's site, from a small vocabulary."""
    found = []
    for number, attempt in enumerate(attempts):
        before = attempts[number - 1].ended if number else ""
        if not number:
            found.append(attempt.decision.reason.partition(":")[0][:60])
        elif before == "released":
            found.append("offloaded to an idle site")
        else:
            found.append(f"moved after: {before}")
    return found


def moves(attempts: Sequence[Attempt]) -> list[Move]:
    """Return the moves between consecutive attempts."""
    return [
        Move(
            "offload" if gone.ended == "released" else "failover",
            gone.decision.site,
            taken.decision.site,
            gone.ended,
        )
        for gone, taken in pairwise(attempts)
    ]
