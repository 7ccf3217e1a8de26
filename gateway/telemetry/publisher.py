"""Publish one snapshot of the federation a second: built once and encoded once for all listeners."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import msgspec

from gateway.domain import Site, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.outcome import Outcome
from gateway.site_events import Event, EventLog
from gateway.telemetry.banner import banner
from gateway.telemetry.history import History, Sample
from gateway.telemetry.recent import Move, Recent
from gateway.telemetry.replicas import Summary, merge_summaries
from gateway.telemetry.route_figures import RouteFigures
from gateway.telemetry.snapshot import (
    Pool,
    Rates,
    SiteViews,
    Snapshot,
    by_cloud,
    no_certificate,
    shown_state,
    totals,
)
from gateway.wording import several

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 1.0
MAX_EVENTS_SHOWN = 60
RESTORED_S = 24 * 3600.0
MAX_SHARED_MOVES = 20
SHARED_MOVES_S = 60.0


class HistoryStore(Protocol):
    """Store of minute samples that outlives the process; implemented by `gateway.store.snapshots`."""

    async def save(self, minute: int, sample: dict[str, object]) -> None: ...
    async def since(self, minute: int) -> list[tuple[int, dict[str, object]]]: ...


MarkPaid = Callable[[int, Sequence[SiteIdentity]], Awaitable[None]]
"""Stores that sites were joined in a minute (unix time / 60)."""


async def _mark_nothing(_minute: int, _sites: Sequence[SiteIdentity]) -> None:
    """Stores nothing: the default without a database."""


def _store_nothing(_event: Event) -> None:
    """Stores nothing: the default without a database."""


class SnapshotPublisher:
    """Builds snapshots. `clock` is the gateway's monotonic clock; `unix_time` dates what people see.

    `certificate_until` is called for every snapshot. `store_event` receives the site events that this replica
    saw; of moved queries only failovers, because offloads are routine and their decisions are stored anyway.

    A listener awaits `after(seq)` and gets the newest snapshot: a slow listener skips some, and nothing is
    queued for any of them. After `close` listeners get None.
    """

    def __init__(
        self,
        directory: Directory,
        replica: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        history_store: HistoryStore | None = None,
        certificate_until: Callable[[str], float] = no_certificate,
        store_event: Callable[[Event], None] = _store_nothing,
        mark_paid: MarkPaid = _mark_nothing,
    ) -> None:
        self.boot_id = secrets.token_hex(4)
        self.events = EventLog()
        self.recent = Recent()
        self.route_figures = RouteFigures()
        self.history = History(self._on_minute)
        self.replica = replica
        self._directory = directory
        self._clock = clock
        self.unix_time = unix_time
        self._history_store = history_store
        self._rates, self._views = Rates(), SiteViews()
        self._moves: deque[Event] = deque(maxlen=MAX_SHARED_MOVES)
        self._paid_minute, self._paid = 0, set[str]()
        self._replica_summaries: Callable[[], Mapping[str, Summary]] = dict
        self._pools: Callable[[], list[Pool]] = list
        self._certificate_until = certificate_until
        self._store_event = store_event
        self._store_paid = mark_paid
        self._published = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.saving: set[asyncio.Task[None]] = set()
        self.encoded = b""
        self.own_summary = Summary()  # of this replica, as of the last snapshot
        self.snapshot: Snapshot | None = None

    async def start(
        self,
        replica_summaries: Callable[[], Mapping[str, Summary]] = dict,
        pools: Callable[[], list[Pool]] = list,
    ) -> None:
        """Restore the last day's history, then publish every second. Without a stored history plots start
        empty.

        Both are called for every snapshot; the first returns the summaries of the other replicas, by name.
        """
        self._replica_summaries, self._pools = replica_summaries, pools
        if self._history_store is not None:
            try:
                kept = await self._history_store.since(int(self.unix_time() // 60) - 24 * 60)
                self.history.restore(msgspec.convert(sample, Sample) for _, sample in kept)
            except Exception:
                log.exception("yesterday's figures could not be read")
        self.tick()
        self._task = asyncio.create_task(self._tick_for_ever())

    async def restore_events(
        self, events_of_replica: Callable[[str, float, int], Awaitable[list[Event]]]
    ) -> None:
        """Restore the events that this replica saw in the last day, before its restart."""
        try:
            newest = await events_of_replica(self.replica, self.unix_time() - RESTORED_S, MAX_EVENTS_SHOWN)
            for event in reversed(newest):
                self.events.add(event)
        except Exception:
            log.exception("yesterday's events could not be read")

    def close(self) -> None:
        """Stop publishing and end every listener."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._notify()

    def observe(self, outcome: Outcome) -> None:
        now_s = self._clock()  # never set back: what is of the last minute stays of the last minute
        self.recent.observe(outcome, now_s)
        self.route_figures.observe(outcome, now_s)

    def summary(self) -> Summary:
        """Summarize the recent queries of this replica alone."""
        now_s, now, recent = self._clock(), self.unix_time(), self.recent
        return Summary(
            failed_per_min=recent.failed_per_min(now_s),
            ended_per_min=recent.ended_per_min(now_s),
            waits=recent.waits(now_s),
            routes=recent.routes(),
            quality=recent.quality(),
            model_routes=self.route_figures.view(now_s),
            moves=[event for event in self._moves if event.at > now - SHARED_MOVES_S],
        )

    async def after(self, seq: int) -> Snapshot | None:
        """Wait for a snapshot newer than `seq` and return the newest; None once the publisher is closed."""
        while not self._closed and (self.snapshot is None or self.snapshot.seq <= seq):
            await self._published.wait()
        return None if self._closed else self.snapshot

    def tick(self) -> Snapshot:
        """Build and publish one snapshot. Synchronous, so that it shows a single moment."""
        now_s, now = self._clock(), self.unix_time()
        sites = self._directory.sites
        self.recent.forget(now_s)
        self._record_events(sites, now_s, now)
        of_others, self.own_summary = self._replica_summaries(), self.summary()
        merged = merge_summaries([self.own_summary, *of_others.values()])
        rates = self._rates.observe(sites, now_s)
        shown = self._views.build(sites, rates, merged.waits, now_s, self._certificate_until)
        summed = totals(shown, merged.failed_per_min, merged.ended_per_min)
        self.snapshot = Snapshot(
            seq=self.snapshot.seq + 1 if self.snapshot else 1,
            at=round(now, 3),
            replica=self.replica,
            replicas=sorted({self.replica, *of_others}),
            banner=banner(shown, summed),
            totals=summed,
            clouds=by_cloud(shown),
            sites=shown,
            pools=self._pools(),
            routes=merged.routes,
            model_routes=merged.model_routes,
            quality=merged.quality,
            events=self.events.newest(MAX_EVENTS_SHOWN),
        )
        self.encoded = self.snapshot.encoded_for_pages()
        self.history.add(self.snapshot.sample())
        self._mark_paid_sites(int(now // 60))
        self._notify()
        return self.snapshot

    def _record_events(self, sites: Sequence[Site], now_s: float, now: float) -> None:
        states = ((s.name, s.identity.boot_id, shown_state(s, now_s)) for s in sites)
        for event in self.events.record_states(now, states, self._directory.down_reasons):
            self._store_event(event)
        for move, number in self.recent.take_moves():
            self._moves.append(event := _move_event(now, move, number))
            self.events.add(event)
            if event.bad:
                self._store_event(event)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)
            try:
                self.tick()
            except Exception:
                log.exception("a snapshot went wrong in an unforeseen way; the page shows the one before")

    def _notify(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _on_minute(self, minute: int, sample: Sample) -> None:
        if self._history_store is not None:
            self._save_aside(self._save(self._history_store, minute, sample))

    def _mark_paid_sites(self, minute: int) -> None:
        """Store which sites that are paid by the hour are joined in this minute, each as soon as it is seen:
        what it answers is paid for from its first second.
        """
        is_new_minute = minute != self._paid_minute
        if is_new_minute:
            self._paid_minute, self._paid = minute, set()
        joined = [site for site in self._directory.sites if site.state is not SiteState.DOWN]
        paid = [each.identity for each in joined if each.identity.usd_per_hour]
        new = [each for each in paid if each.name not in self._paid]
        if new or is_new_minute:  # the latter also for what the database missed
            self._paid.update(each.name for each in new)
            self._save_aside(self._mark_paid(minute, new))

    def _save_aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.saving.add(task)
        task.add_done_callback(self.saving.discard)

    async def _save(self, store: HistoryStore, minute: int, sample: Sample) -> None:
        try:
            await store.save(minute, asdict(sample))
        except Exception:
            log.exception("a minute of figures could not be kept")

    async def _mark_paid(self, minute: int, sites: Sequence[SiteIdentity]) -> None:
        try:
            await self._store_paid(minute, sites)
        except Exception:
            log.exception("the hours of sites could not be stored now; they are with the next minute's")


def _move_event(now: float, move: Move, number: int) -> Event:
    queries = several(number, "query", "queries")
    if move.kind == "offload":
        return Event(
            now, "offload", move.taker, f"took {queries} that waited at {move.donor}: it was idle and bid"
        )
    text = f"{move.why}: {queries} went on at {move.taker}"
    return Event(now, "failover", move.donor, text, bad=True)
