"""What the queries of all replicas say together, so that a page shows the federation whichever one serves it.

Each replica writes its own summary down and reads the others'. Figures of sites need none of this: sites
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
from gateway.store.figures import Written
from gateway.telemetry.recent import NO_WAITS, Quality, Route, SiteWaits

log = logging.getLogger(__name__)

EVERY_S = 2.0
FRESH_S = 10.0
"""A replica that has written nothing new for so long is no longer counted."""
ROUTES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Summary:
    """What the queries of the last minutes say. `moves` are offloads and failovers as events."""

    failed_per_min: float = 0.0
    ended_per_min: float = 0.0
    waits: dict[str, SiteWaits] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    quality: Quality | None = None
    moves: list[Event] = field(default_factory=list)


def together(summaries: Sequence[Summary]) -> Summary:
    """Counts are summed. Of waits and errors the worst replica's stands: it holds for all of them."""
    attempts: Counter[tuple[str, str]] = Counter()
    for each in summaries:
        for route in each.routes:
            attempts[route.reason, route.site] += route.attempts
    sites = {site for each in summaries for site in each.waits}
    return Summary(
        failed_per_min=sum(each.failed_per_min for each in summaries),
        ended_per_min=sum(each.ended_per_min for each in summaries),
        waits={site: _waits([each.waits.get(site, NO_WAITS) for each in summaries]) for site in sites},
        routes=[Route(*key, number) for key, number in attempts.most_common(ROUTES_SHOWN)],
        quality=_quality([each.quality for each in summaries if each.quality]),
    )


def _waits(waits: Sequence[SiteWaits]) -> SiteWaits:
    return SiteWaits(
        ttft_p95_s=max((each.ttft_p95_s for each in waits if each.ttft_p95_s is not None), default=None),
        itl_p95_s=max((each.itl_p95_s for each in waits if each.itl_p95_s is not None), default=None),
        errors_per_min=sum(each.errors_per_min for each in waits),
    )


def _quality(found: Sequence[Quality]) -> Quality | None:
    if not found:
        return None
    answers = sum(each.answers for each in found)
    return Quality(
        source=", ".join(sorted({each.source for each in found})),
        answers=answers,
        under_p50=round(sum(each.under_p50 * each.answers for each in found) / answers, 3),
        under_p90=round(sum(each.under_p90 * each.answers for each in found) / answers, 3),
        error_p50_tokens=max(each.error_p50_tokens for each in found),
    )


class Shelf(Protocol):
    """Where replicas leave word for each other; `gateway.store.figures.Figures` is one."""

    async def tell(self, mine: Written) -> list[Written]: ...


class Others:
    """`summaries` is what the other replicas said last, by name; `tell` is given their moves, each once."""

    def __init__(
        self,
        shelf: Shelf,
        replica: str,
        own: Callable[[], Summary],
        tell: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.summaries: dict[str, Summary] = {}
        self._shelf = shelf
        self._replica = replica
        self._own = own
        self._tell = tell
        self._clock = clock
        self._unix_time = unix_time
        self._seen: dict[
            str, tuple[float, float]
        ] = {}  # what each replica dated its word, and when it was new
        self._told: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled. While the database is away the page is of this replica alone, and says so."""
        while True:
            try:
                await self.look()
            except (SQLAlchemyError, OSError) as exc:
                self.summaries = {}
                log.warning("the page is of this replica alone: %s", reason(exc))
            except Exception:
                self.summaries = {}
                log.exception("what other replicas say could not be understood")
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        mine = Written(self._replica, self._unix_time(), asdict(self._own()))
        found = {each.replica: each for each in await self._shelf.tell(mine)}
        fresh = self._fresh(found.values())
        self.summaries = {name: msgspec.convert(found[name].summary, Summary) for name in fresh}
        for name, summary in self.summaries.items():
            self._pass_on(name, summary.moves)

    def _fresh(self, found: Collection[Written]) -> list[str]:
        """Those whose word changed lately on our own clock: replicas' clocks need not agree.

        A replica that is not found any more is forgotten.
        """
        now_s, seen = self._clock(), self._seen
        self._told = {each.replica: self._told[each.replica] for each in found if each.replica in self._told}
        self._seen = {
            each.replica: seen[each.replica]
            if seen.get(each.replica, (None,))[0] == each.at
            else (each.at, now_s)
            for each in found
        }
        return [name for name, (_, new_s) in self._seen.items() if now_s - new_s <= FRESH_S]

    def _pass_on(self, replica: str, moves: Sequence[Event]) -> None:
        last = self._told.get(replica, 0.0)
        for event in moves:
            if event.at > last:
                self._tell(event)
                self._told[replica] = max(event.at, self._told.get(replica, 0.0))
