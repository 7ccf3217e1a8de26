"""Report the load of a site to its gateways: figures, bids for work, a stalled engine, keep-alives.

`report_pace.py` decides when figures are worth a report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from site_engine import messages as m
from site_engine.core.load import LoadFigures
from site_engine.engine_client import EngineClient, LoadSeen
from site_engine.federation.connection import PINGS_RARELY, READS_STALLS, Connection
from site_engine.federation.report_pace import REPORT_EVERY_S, LoadSummary

log = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 1.5
"""Seconds without a report after which a site sends a keep-alive: gateways judge its engine by reports."""
BID_INTERVAL_S = 1.0
NO_PING = 0
"""Marks a pong that answers no ping; pings are numbered from 1."""
STUCK_AFTER_S = 120.0
"""Seconds without progress after which an engine counts as lost, and a new process must load the model."""


class LoadReports:
    """`on_stuck` is called with the reason if the process must be restarted."""

    def __init__(
        self,
        hello: m.Hello,
        engine: EngineClient,
        connections: Mapping[str, Connection],
        clock: Callable[[], float],
        on_stuck: Callable[[str], None],
    ) -> None:
        self.sent = 0  # so far, to all gateways together
        self.unknown_messages = 0  # of kinds that only newer gateways know
        self._hello = hello
        self._engine = engine
        self._connections = connections
        self._clock = clock
        self._on_stuck = on_stuck
        self._loads = 0
        self._load_s = float("-inf")  # when any gateway was last sent a report
        self._figures: LoadFigures | None = None
        self._stalled = False

    def tick(self, now: float) -> None:
        """Request a report when one is due. Report on behalf of an engine that is busy or has stalled."""
        if any(each.linked and each.reports.is_late(now) for each in self._connections.values()):
            self._engine.request_load()
        self._watch_engine(now)
        self._show_life(now)

    def report(self, seen: LoadSeen, *, draining: bool) -> None:
        """Report figures to each gateway for which they have changed enough, or with a bid."""
        self._figures = figures = seen.figures
        summary = LoadSummary.of(figures, self._hello.slots, self._hello.kv_capacity_tokens)
        linked = [each for each in self._connections.values() if each.linked]
        bidding = [each for each in linked if self._may_bid(each, figures, draining)]
        to = [each for each in linked if each in bidding or each.reports.is_due(summary, seen.at_s)]
        if not to:
            return
        for each in to:
            each.reports.reported(summary, seen.at_s)
        self._send(to, seen)
        for each in bidding:
            each.has_bid, each.bid_s = True, self._clock()
            each.attempts.outbox.bid(m.Bid())

    def _may_bid(self, connection: Connection, figures: LoadFigures, draining: bool) -> bool:
        """Return whether to send a bid: once each time that room appears. Without room, withdraw an unsent
        bid.
        """
        free_slots = self._hello.slots - figures.running
        preparing = any(each.attempts.preparing for each in self._connections.values())
        room = free_slots > 0 and figures.kv_free_tokens > 0 and not (figures.pending or preparing)
        if not room or draining or connection.reports.is_rare:
            connection.withdraw_bid()
            return False
        return not connection.has_bid and self._clock() - connection.bid_s >= BID_INTERVAL_S

    def _watch_engine(self, now: float) -> None:
        """Report an engine without progress, which cannot report itself."""
        was_stalled, stalled_s = self._stalled, self._engine.stalled_s()
        self._stalled = stalled_s > 0
        if was_stalled and not self._stalled:
            log.warning("the engine moves again")
        if not self._stalled:
            return
        connections = self._connections.values()
        if not was_stalled:
            live = sum(each.attempts.live for each in connections)
            log.error("the engine has not moved for %.1f s; %d attempts wait for it", stalled_s, live)
        if stalled_s >= STUCK_AFTER_S:
            self._on_stuck(f"it has not moved for {stalled_s:.0f} s")
        if self._figures is not None and (not was_stalled or now - self._load_s >= REPORT_EVERY_S):
            able = [each for each in connections if each.linked and each.protocol >= READS_STALLS]
            self._send(able, LoadSeen(self._figures, now), stalled_s)
            for each in able:
                each.reports.forget()  # whatever comes next is news
                each.withdraw_bid()

    def _send(self, to: Iterable[Connection], seen: LoadSeen, stalled_s: float = 0.0) -> None:
        self._load_s = seen.at_s
        self._loads += 1
        load = m.Load(self._loads, seen.figures, stalled_s, self.unknown_messages)
        for connection in to:
            self.sent += 1
            connection.reported_s = seen.at_s
            connection.attempts.outbox.load(load)
            connection.wake()

    def _show_life(self, now: float) -> None:
        """Send a keep-alive during a long iteration, as rarely as reports of an idle site: a pong that
        answers no ping.
        """
        for each in self._connections.values():
            if now - max(each.reported_s, each.sign_s) < SIGN_OF_LIFE_S:
                continue
            owed = now - each.reported_s >= SIGN_OF_LIFE_S + each.reports.every_s - REPORT_EVERY_S
            if each.linked and each.protocol >= PINGS_RARELY and (owed or not each.is_idle):
                each.sign_s = now
                each.attempts.outbox.put(m.Pong(NO_PING, time.time()))
                each.wake()
