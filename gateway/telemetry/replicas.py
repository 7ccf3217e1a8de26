"""Merge the query summaries of all replicas, so that the page shows the federation whichever replica serves
it.

Each replica stores its own summary and reads those of the others. Does not share load figures of sites: sites
report to every replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.site_events import Event
from gateway.store.database import reason
from gateway.store.snapshots import ReplicaSummary
from gateway.telemetry.recent import NO_WAITS, ForecastQuality, Route, SiteWaits
from gateway.telemetry.route_figures import TargetFigures, merge_figures

log = logging.getLogger(__name__)

EXCHANGE_INTERVAL_S = 2.0
FRESH_S = 10.0
"""A replica whose summary has not changed for this long is no longer counted."""
MAX_ROUTES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of one replica's queries of the last minutes. `moves` are offloads and failovers as events."""

    failed_per_min: float = 0.0
    ended_per_min: float = 0.0
    waits: dict[str, SiteWaits] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    quality: ForecastQuality | None = None
    model_routes: list[TargetFigures] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)


def merge_summaries(summaries: Sequence[Summary]) -> Summary:
    """Sum the counts; of waits take the worst replica's, which bounds all of them."""
    attempts: Counter[tuple[str, str]] = Counter()
    for each in summaries:
        for route in each.routes:
            attempts[route.reason, route.site] += route.attempts
    sites = {site for each in summaries for site in each.waits}
    return Summary(
        failed_per_min=sum(each.failed_per_min for each in summaries),
        ended_per_min=sum(each.ended_per_min for each in summaries),
        waits={site: _merge_waits([each.waits.get(site, NO_WAITS) for each in summaries]) for site in sites},
        routes=[Route(*key, number) for key, number in attempts.most_common(MAX_ROUTES_SHOWN)],
        model_routes=merge_figures([each.model_routes for each in summaries]),
        quality=_merge_quality([each.quality for each in summaries if each.quality]),
    )


def _merge_waits(waits: Sequence[SiteWaits]) -> SiteWaits:
    return SiteWaits(
        ttft_p95_s=max((each.ttft_p95_s for each in waits if each.ttft_p95_s is not None), default=None),
        itl_p95_s=max((each.itl_p95_s for each in waits if each.itl_p95_s is not None), default=None),
        errors_per_min=sum(each.errors_per_min for each in waits),
        prompt_tokens=sum(each.prompt_tokens for each in waits),
        cached_tokens=sum(each.cached_tokens for each in waits),
    )


def _merge_quality(found: Sequence[ForecastQuality]) -> ForecastQuality | None:
    if not found:
        return None
    answers = sum(each.answers for each in found)
    return ForecastQuality(
        source=", ".join(sorted({each.source for each in found})),
        answers=answers,
        under_p50=round(sum(each.under_p50 * each.answers for each in found) / answers, 3),
        under_p90=round(sum(each.under_p90 * each.answers for each in found) / answers, 3),
        error_p50_tokens=max(each.error_p50_tokens for each in found),
    )


class SummaryStore(Protocol):
    """Store through which replicas exchange summaries; implemented by `gateway.store.snapshots`."""

    async def exchange(self, own: ReplicaSummary) -> list[ReplicaSummary]: ...


class SummaryExchange:
    """Writes this replica's summary and reads those of the others.

    `summaries` holds the newest summary of every other replica, by name. `on_move` receives each of their
    moves once.
    """

    def __init__(
        self,
        store: SummaryStore,
        replica: str,
        own_summary: Callable[[], Summary],
        on_move: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float],
    ) -> None:
        self.summaries: dict[str, Summary] = {}
        self._store = store
        self._replica = replica
        self._own_summary = own_summary
        self._on_move = on_move
        self._clock = clock
        self._unix_time = unix_time
        self._seen: dict[
            str, tuple[float, float]
        ] = {}  # the newest `at` of each replica, and when it was new
        self._last_move_at: dict[str, float] = {}

    async def run(self) -> None:
        """Exchange summaries until cancelled.

        While the database is away the page shows this replica alone.
        """
        while True:
            try:
                await self.exchange()
            except (SQLAlchemyError, OSError) as exc:
                self.summaries = {}
                log.warning("the page is of this replica alone: %s", reason(exc))
            except Exception:
                self.summaries = {}
                log.exception("the summaries of other replicas could not be read")
            await asyncio.sleep(EXCHANGE_INTERVAL_S)

    async def exchange(self) -> None:
        """Exchange once."""
        own = ReplicaSummary(self._replica, self._unix_time(), asdict(self._own_summary()))
        found = {each.replica: each for each in await self._store.exchange(own)}
        fresh = self._fresh(found.values())
        self.summaries = {name: msgspec.convert(found[name].summary, Summary) for name in fresh}
        for name, summary in self.summaries.items():
            self._forward_moves(name, summary.moves)

    def _fresh(self, found: Collection[ReplicaSummary]) -> list[str]:
        """Return the replicas whose summary changed lately on our own clock: replicas' clocks need not agree.

        Forgets replicas that are not found any more.
        """
        now_s, seen, moves = self._clock(), self._seen, self._last_move_at
        self._last_move_at = {each.replica: moves[each.replica] for each in found if each.replica in moves}
        self._seen = {
            each.replica: seen[each.replica]
            if seen.get(each.replica, (None,))[0] == each.at
            else (each.at, now_s)
            for each in found
        }
        return [name for name, (_, new_s) in self._seen.items() if now_s - new_s <= FRESH_S]

    def _forward_moves(self, replica: str, moves: Sequence[Event]) -> None:
        last = self._last_move_at.get(replica, 0.0)
        for event in moves:
            if event.at > last:
                self._on_move(event)
                self._last_move_at[replica] = max(event.at, self._last_move_at.get(replica, 0.0))
