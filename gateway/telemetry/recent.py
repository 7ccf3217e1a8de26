"""What the queries of the last five minutes say: waits, errors, why they went where they went, the forecasts.

Of this replica's queries only: together.py adds the others'. Does not know of sites that nobody asked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from gateway.domain import Attempt, Outcome, Status
from predictor.forecast import Forecast

WINDOW_S = 300.0
ERRORS_WINDOW_S = 60.0
MOST_KEPT = 2_000
"""Queries of which times and forecasts are kept."""


class Ended(NamedTuple):
    """One query as it ended, reduced to what is compared here. `at` is unix time."""

    at: float
    site: str
    ttft_s: float | None
    itl_s: float | None
    forecast: tuple[str, int, int, int] | None


@dataclass(slots=True)
class Second:
    """What ended within one second, counted."""

    at: int
    ended: int = 0
    failed: int = 0
    broke: Counter[str] = field(default_factory=Counter)
    routes: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class SiteWaits:
    """95% of the queries of a site waited less; None where there were none."""

    ttft_p95_s: float | None
    itl_p95_s: float | None
    errors_per_min: float


NO_WAITS = SiteWaits(None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Route:
    """So many attempts went to `site` for `reason`."""

    reason: str
    site: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Forecasts against answers. Well calibrated means a half under p50 and nine tenths under p90."""

    source: str
    answers: int
    under_p50: float
    under_p90: float
    error_p50_tokens: float


class Move(NamedTuple):
    """A query that went on elsewhere: `kind` is "offload" or "failover"."""

    kind: str
    donor: str
    taker: str
    why: str


class Ranked:
    """Values in order: a snapshot a second reads quantiles off, where sorting them would hold the loop."""

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


class RankedBySite:
    """A site of which no value is left is forgotten."""

    def __init__(self) -> None:
        self.of: dict[str, Ranked] = {}

    def add(self, site: str, value: float | None) -> None:
        if value is not None:
            self.of.setdefault(site, Ranked()).add(value)

    def drop(self, site: str, value: float | None) -> None:
        if value is not None:
            self.of[site].drop(value)
            if not self.of[site]:
                del self.of[site]

    def p95(self, site: str) -> float | None:
        found = self.of[site].quantile(0.95) if site in self.of else None
        return None if found is None else round(found, 4)


class Recent:
    """What is asked of all queries that are kept is counted as they come and go."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        self._ttft = RankedBySite()
        self._itl = RankedBySite()
        self._errors_p50 = Ranked()
        self._under: Counter[str] = Counter()
        self._seconds: deque[Second] = deque()
        self._routes: Counter[tuple[str, str]] = Counter()
        self._moves: Counter[Move] = Counter()

    def observe(self, outcome: Outcome, at: float) -> None:
        if len(self._ended) == MOST_KEPT:
            self._drop()
        self._keep(reduce(outcome, at))
        if not self._seconds or self._seconds[-1].at != int(at):
            self._seconds.append(Second(int(at)))
        second = self._seconds[-1]
        second.ended += 1
        second.failed += is_failure(outcome)
        for kind, attempt in zip(kinds(outcome.attempts), outcome.attempts, strict=True):
            second.routes[kind, attempt.decision.site] += 1
            self._routes[kind, attempt.decision.site] += 1
            if attempt.ended in ("lost", "failed"):
                second.broke[attempt.decision.site] += 1
        if len(outcome.attempts) > 1:
            self._moves.update(moves(outcome.attempts))

    def _keep(self, query: Ended) -> None:
        self._ended.append(query)
        self._ttft.add(query.site, query.ttft_s)
        self._itl.add(query.site, query.itl_s)
        if query.forecast is not None:
            _, p50, p90, actual = query.forecast
            self._errors_p50.add(abs(p50 - actual))
            self._under["p50"] += actual <= p50
            self._under["p90"] += actual <= p90

    def _drop(self) -> None:
        """The oldest."""
        query = self._ended.popleft()
        self._ttft.drop(query.site, query.ttft_s)
        self._itl.drop(query.site, query.itl_s)
        if query.forecast is not None:
            _, p50, p90, actual = query.forecast
            self._errors_p50.drop(abs(p50 - actual))
            self._under["p50"] -= actual <= p50
            self._under["p90"] -= actual <= p90

    def take_moves(self) -> list[tuple[Move, int]]:
        """Moves since the last call, each with its number."""
        taken, self._moves = self._moves, Counter()
        return taken.most_common(20)

    def forget(self, now: float) -> None:
        while self._ended and self._ended[0].at < now - WINDOW_S:
            self._drop()
        while self._seconds and self._seconds[0].at < now - WINDOW_S:
            self._routes -= self._seconds.popleft().routes

    def waits(self, now: float) -> dict[str, SiteWaits]:
        """By site, of all that had queries or errors."""
        broke: Counter[str] = Counter()
        for second in self._last_minute(now):
            broke.update(second.broke)
        names = self._ttft.of.keys() | self._itl.of.keys() | broke.keys()
        return {
            name: SiteWaits(self._ttft.p95(name), self._itl.p95(name), float(broke[name])) for name in names
        }

    def failed_per_min(self, now: float) -> float:
        return float(sum(second.failed for second in self._last_minute(now)))

    def ended_per_min(self, now: float) -> float:
        return float(sum(second.ended for second in self._last_minute(now)))

    def _last_minute(self, now: float) -> list[Second]:
        return [second for second in self._seconds if second.at > now - ERRORS_WINDOW_S]

    def routes(self) -> list[Route]:
        return [Route(reason, site, number) for (reason, site), number in self._routes.most_common(12)]

    def quality(self) -> Quality | None:
        answers, error_p50 = len(self._errors_p50), self._errors_p50.quantile(0.5)
        newest = next((each.forecast for each in reversed(self._ended) if each.forecast is not None), None)
        if newest is None or error_p50 is None:
            return None
        return Quality(
            source=newest[0],
            answers=answers,
            under_p50=round(self._under["p50"] / answers, 3),
            under_p90=round(self._under["p90"] / answers, 3),
            error_p50_tokens=error_p50,
        )


def reduce(outcome: Outcome, at: float) -> Ended:
    answered, first_s = outcome.status is Status.ANSWERED, outcome.first_token_s
    itl_s = None
    if first_s is not None and outcome.completion_tokens > 1:
        itl_s = (outcome.total_s - first_s) / (outcome.completion_tokens - 1)
    return Ended(
        at=at,
        site=outcome.site,
        ttft_s=first_s,
        itl_s=itl_s,
        forecast=against(outcome.forecast, outcome.completion_tokens) if answered else None,
    )


def against(forecast: Forecast | None, actual: int) -> tuple[str, int, int, int] | None:
    if forecast is None:
        return None
    return forecast.source, forecast.quantile(0.5), forecast.quantile(0.9), actual


def is_failure(outcome: Outcome) -> bool:
    """What a client saw as our failure: not its own mistake or quota, and not its own leaving."""
    return outcome.status in (Status.FAILED, Status.REFUSED) and not outcome.mistaken


def kinds(attempts: Sequence[Attempt]) -> list[str]:
    """Why each attempt went where it went, in a few words of a small vocabulary."""
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
    return [
        Move(
            "offload" if gone.ended == "released" else "failover",
            gone.decision.site,
            taken.decision.site,
            gone.ended,
        )
        for gone, taken in pairwise(attempts)
    ]
