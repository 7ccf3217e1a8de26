"""Turn operators' acts into orders: stored, shared with the other replicas and carried out here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from gateway.admin.preview import Preview, preview
from gateway.errors import BadRequest, Overloaded
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.operator_orders import SERVICE, Action, AuditEntry, Order, Verb, order_of, standings, subject_of
from gateway.site_events import OPERATOR, Event
from gateway.store.database import reason
from gateway.store.orders import OrderTable
from gateway.tasks import cancel
from gateway.telemetry.publisher import SnapshotPublisher

log = logging.getLogger(__name__)

REFRESH_S = 1.0
REFRESH_TIMEOUT_S = 2.0
"""Bounds a refresh, so that orders expire on time even if the database does not answer."""
MAX_ENTRIES_SHOWN = 50
OVERLAP_S = 3600.0
"""Seconds before the newest entry that are read again: each replica dates entries by its own clock."""


class OrderService:
    """Applies the active orders. Without the database, the last known orders apply and expire on time."""

    def __init__(
        self,
        table: OrderTable,
        directory: Directory,
        links: Mapping[str, Link],
        publisher: SnapshotPublisher,
        *,
        unix_time: Callable[[], float],
    ) -> None:
        self.orders: list[Order] = []
        self._table = table
        self._directory = directory
        self._links = links
        self._publisher = publisher
        self._unix_time = unix_time
        self._published: deque[str] = deque(maxlen=4 * MAX_ENTRIES_SHOWN)
        self._newest_at = 0.0  # of the published entries
        self._refreshing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        await cancel(self._task)

    def preview(self, action: Action) -> Preview:
        """Return the expected effect of an act. Raises BadRequest where the act makes no sense.

        An order can be lifted even if its site or model is no longer there.
        """
        sites = (
            self._publisher.tick().sites
            if self._publisher.snapshot is None
            else self._publisher.snapshot.sites
        )
        site = next((site for site in sites if site.name == action.site), None)
        lifts = order_of(action, "", 0.0) is None and any(
            each.site == action.site and each.subject == subject_of(action) for each in self.orders
        )
        if site is None and lifts:
            text = (
                f"{action.verb.value} {action.site}: it is not listed now, and will join without this order."
            )
            return Preview(text, [], None, None, 0, None, [], [])
        if site is None:
            names = ", ".join(site.name for site in sites) or "none"
            raise BadRequest(f"there is no site {action.site!r}; sites now: {names}", param="site")
        if action.verb in (Verb.PIN_OFF, Verb.UNPIN) and action.model not in site.models and not lifts:
            served = ", ".join(site.models)
            raise BadRequest(
                f"{site.name} does not serve {action.model!r}; it serves: {served}", param="model"
            )
        return preview(action, sites)

    async def act(self, action: Action, who: str) -> Preview:
        """Store the act's order, apply it and return the expected effect.

        Raises BadRequest, or Overloaded if the database is unavailable; then nothing has changed.
        """
        expected, now = self.preview(action), self._unix_time()
        order = order_of(action, who, now)
        try:
            await self._table.change(
                action.site,
                subject_of(action),
                order,
                action=_verb_text(action),
                who=who,
                reason=action.reason,
                now=now,
            )
        except (SQLAlchemyError, OSError) as exc:
            raise Overloaded(f"nothing was changed: the database is away ({reason(exc)})") from exc
        await self._refresh()
        return expected

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._refresh()
            except Exception:
                log.exception("a refresh of the orders went wrong in an unforeseen way")

    async def _refresh(self) -> None:
        """Read and apply the orders, one refresh at a time: an older refresh must not undo a newer order."""
        async with self._refreshing:
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT_S):
                    self.orders = await self._table.orders()
                    since = min(self._newest_at, self._unix_time()) - OVERLAP_S
                    self._publish(await self._table.entries(MAX_ENTRIES_SHOWN, since))
            except (SQLAlchemyError, OSError) as exc:
                log.warning("orders are as of the last refresh: %s", reason(exc))
            now = self._unix_time()
            self._directory.apply_standings(standings(self.orders, now))
            self._move_due(now)
            await self._expire_orders(now)

    def _move_due(self, now: float) -> None:
        for order in self.orders:
            due = order.subject == SERVICE and order.move_at is not None and order.move_at <= now
            link = self._links.get(order.site)
            if due and link is not None and order.is_active(now):
                link.move_away(f"{order.site} was paused by an operator")

    async def _expire_orders(self, now: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                for order in self.orders:
                    if not order.is_active(now):
                        with suppress(SQLAlchemyError, OSError):
                            await self._table.expire(order, now)

    def _publish(self, entries: list[AuditEntry]) -> None:
        """Add one event for each audit entry of any replica, including acts that leave no order."""
        for entry in reversed(entries):
            self._newest_at = max(self._newest_at, entry.at)
            if entry.id not in self._published:
                self._published.append(entry.id)
                self._publisher.events.add(event_of(entry))


def _verb_text(action: Action) -> str:
    if action.verb is Verb.WEIGHT:
        return f"weight {action.weight:g}"
    return f"{action.verb.value} {action.model}".strip()


def event_of(entry: AuditEntry) -> Event:
    """Return the entry as an operator's event."""
    until = ""
    if entry.until_at is not None and entry.until_at > entry.at:
        for_s = entry.until_at - entry.at
        until = f" (for {for_s / 60:.0f} min)" if for_s >= 60 else f" (for {for_s:.0f} s)"
    why = f": {entry.reason}" if entry.reason else ""
    return Event(entry.at, OPERATOR, entry.site, f"{entry.action}{until}{why}", entry.who)
