"""One snapshot of the federation a second, for everyone who looks: built once and encoded once."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Protocol

import msgspec

from gateway.domain import Outcome
from gateway.federation.directory import Directory
from gateway.site_events import Event, EventLog
from gateway.telemetry.banner import banner
from gateway.telemetry.history import History, Sample
from gateway.telemetry.recent import Move, Recent
from gateway.telemetry.replicas import Summary, together
from gateway.telemetry.snapshot import (
    Pool,
    Rates,
    Snapshot,
    by_cloud,
    no_certificate,
    shown_state,
    totals,
    views,
)
from gateway.wording import several

log = logging.getLogger(__name__)

EVERY_S = 1.0
EVENTS_SHOWN = 60
REMEMBERED_S = 24 * 3600.0
MOVES_SHARED = 20
MOVES_SHARED_S = 60.0


class Keeper(Protocol):
    """Where minutes outlive the process; `gateway.store.figures.Figures` is one."""

    async def save(self, minute: int, sample: dict[str, object]) -> None: ...
    async def since(self, minute: int) -> list[tuple[int, dict[str, object]]]: ...


class Watch:
    """`clock` is the gateway's monotonic clock, `unix_time` dates what people see.

    `others` is what the other replicas say of their queries, by name; `pools` and `certificate_until` are
    asked at every look, too. `keep` is told what this replica saw happen to sites: of queries that moved
    only failovers, since offloads are daily business and their decisions are kept.

    A listener awaits `after(seq)`: it gets the newest snapshot, so one that is slow skips some, and nothing
    is queued for anybody. After `close` it gets None.
    """

    def __init__(
        self,
        directory: Directory,
        replica: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        keeper: Keeper | None = None,
    ) -> None:
        self.boot_id = secrets.token_hex(4)
        self.events = EventLog()
        self.recent = Recent()
        self.history = History(self._minute_is_over)
        self.replica = replica
        self._directory = directory
        self._clock = clock
        self.unix_time = unix_time
        self._keeper = keeper
        self._rates = Rates()
        self._moves: deque[Event] = deque(maxlen=MOVES_SHARED)
        self.others: Callable[[], Mapping[str, Summary]] = dict
        self.pools: Callable[[], list[Pool]] = list
        self.certificate_until: Callable[[str], float] = no_certificate
        self.keep: Callable[[Event], None] = not_kept
        self._news = asyncio.Event()
        self._closed = False
        self._ticking: asyncio.Task[None] | None = None
        self.saving: set[asyncio.Task[None]] = set()
        self.encoded = b""
        self.said = Summary()  # by this replica at the last look
        self.snapshot: Snapshot | None = None

    async def start(self) -> None:
        """What was kept of the last day comes back first; without it the plots start empty."""
        if self._keeper is not None:
            try:
                kept = await self._keeper.since(int(self.unix_time() // 60) - 24 * 60)
                self.history.restore(msgspec.convert(sample, Sample) for _, sample in kept)
            except Exception:
                log.exception("yesterday's figures could not be read")
        self.tick()
        self._ticking = asyncio.create_task(self._tick_for_ever())

    async def remember(self, seen_by: Callable[[str, float, int], Awaitable[list[Event]]]) -> None:
        """What this replica saw in the last day, before it was started again."""
        try:
            newest = await seen_by(self.replica, self.unix_time() - REMEMBERED_S, EVENTS_SHOWN)
            for event in reversed(newest):
                self.events.add(event)
        except Exception:
            log.exception("yesterday's events could not be read")

    def close(self) -> None:
        """Every listener ends."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        self._wake()

    def observe(self, outcome: Outcome) -> None:
        self.recent.observe(outcome, self.unix_time())

    def summary(self) -> Summary:
        """What the queries of this replica alone say."""
        now, recent = self.unix_time(), self.recent
        return Summary(
            failed_per_min=recent.failed_per_min(now),
            ended_per_min=recent.ended_per_min(now),
            waits=recent.waits(now),
            routes=recent.routes(),
            quality=recent.quality(),
            moves=[event for event in self._moves if event.at > now - MOVES_SHARED_S],
        )

    async def after(self, seq: int) -> Snapshot | None:
        """The newest snapshot that is newer than `seq`; None once the watch is closed."""
        while not self._closed and (self.snapshot is None or self.snapshot.seq <= seq):
            await self._news.wait()
        return None if self._closed else self.snapshot

    def tick(self) -> Snapshot:
        """Look once. Synchronous: a picture of one moment."""
        now_s, now = self._clock(), self.unix_time()
        sites = self._directory.sites
        self.recent.forget(now)
        states = ((s.name, s.identity.boot_id, shown_state(s, now_s)) for s in sites)
        for changed in self.events.states(now, states, self._directory.why_left):
            self.keep(changed)
        for move, number in self.recent.take_moves():
            self._moves.append(moved := _moved(now, move, number))
            self.events.add(moved)
            if moved.bad:
                self.keep(moved)
        others, self.said = self.others(), self.summary()
        said = together([self.said, *others.values()])
        rates = self._rates.observe(sites, now_s)
        shown = views(sites, rates, said.waits, now_s, self.certificate_until)
        summed = totals(shown, said.failed_per_min, said.ended_per_min)
        self.snapshot = Snapshot(
            seq=self.snapshot.seq + 1 if self.snapshot else 1,
            at=round(now, 3),
            replica=self.replica,
            replicas=sorted({self.replica, *others}),
            banner=banner(shown, summed),
            totals=summed,
            clouds=by_cloud(shown),
            sites=shown,
            pools=self.pools(),
            routes=said.routes,
            quality=said.quality,
            events=self.events.latest(EVENTS_SHOWN),
        )
        self.encoded = msgspec.json.encode(self.snapshot)
        self.history.add(self.snapshot.sample())
        self._wake()
        return self.snapshot

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.tick()
            except Exception:
                log.exception("a snapshot went wrong in an unforeseen way; the page shows the one before")

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _minute_is_over(self, minute: int, sample: Sample) -> None:
        if self._keeper is not None:
            task = asyncio.create_task(self._save(self._keeper, minute, sample))
            self.saving.add(task)
            task.add_done_callback(self.saving.discard)

    async def _save(self, keeper: Keeper, minute: int, sample: Sample) -> None:
        try:
            await keeper.save(minute, asdict(sample))
        except Exception:
            log.exception("a minute of figures could not be kept")


def not_kept(_event: Event) -> None:
    """Without a database."""


def _moved(now: float, move: Move, number: int) -> Event:
    queries = several(number, "query", "queries")
    if move.kind == "offload":
        return Event(
            now, "offload", move.taker, f"took {queries} that waited at {move.donor}: it was idle and bid"
        )
    text = f"{move.why}: {queries} went on at {move.taker}"
    return Event(now, "failover", move.donor, text, bad=True)
