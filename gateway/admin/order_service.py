"""Where operators' acts become orders: written down, shared with the other replicas, carried out here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from gateway.admin.preview import Preview, preview
from gateway.domain import SiteState
from gateway.errors import BadRequest, Overloaded
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.operator_orders import SERVICE, Action, Entry, Order, Verb, order_of, standings, subject_of
from gateway.routing.failover import same_weights
from gateway.site_events import Event
from gateway.store.database import reason
from gateway.store.orders import OrderBook
from gateway.telemetry.publisher import Watch

log = logging.getLogger(__name__)

EVERY_S = 1.0
LOOK_WITHIN_S = 2.0
"""A database that is silent keeps no order from ending on time."""
ENTRIES_SHOWN = 50


class Desk:
    """While the database is away what was ordered last stays good, and ends on time."""

    def __init__(
        self,
        book: OrderBook,
        directory: Directory,
        links: Mapping[str, Link],
        watch: Watch,
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.orders: list[Order] = []
        self._book = book
        self._directory = directory
        self._links = links
        self._watch = watch
        self._unix_time = unix_time
        self._told: set[str] = set()
        self._first_look = True
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._look()
        self._task = asyncio.create_task(self._look_for_ever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def preview(self, action: Action) -> Preview:
        """Raises BadRequest where the act makes no sense."""
        sites = self._watch.tick().sites if self._watch.snapshot is None else self._watch.snapshot.sites
        site = next((site for site in sites if site.name == action.site), None)
        if site is None:
            names = ", ".join(site.name for site in sites) or "none"
            raise BadRequest(f"there is no site {action.site!r}; sites now: {names}", param="site")
        if action.verb in (Verb.PIN_OFF, Verb.UNPIN) and action.model not in site.models:
            served = ", ".join(site.models)
            raise BadRequest(
                f"{site.name} does not serve {action.model!r}; it serves: {served}", param="model"
            )
        return preview(action, sites)

    async def act(self, action: Action, who: str) -> Preview:
        """Raises BadRequest, or Overloaded when it could not be written down: then nothing has changed."""
        expected, now = self.preview(action), self._unix_time()
        order = order_of(action, who, now)
        try:
            await self._book.change(
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
        await self._look()
        return expected

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._look()
            except Exception:
                log.exception("looking for orders went wrong in an unforeseen way")

    async def _look(self) -> None:
        """One at a time: what an older look found must not undo what was ordered meanwhile."""
        async with self._looking:
            try:
                async with asyncio.timeout(LOOK_WITHIN_S):
                    found = await self._book.orders()
                    if self._first_look or found != self.orders:
                        self._tell(await self._book.entries(ENTRIES_SHOWN))
                self.orders, self._first_look = found, False
            except (SQLAlchemyError, OSError) as exc:
                log.warning("orders are as of the last look at the database: %s", reason(exc))
            now = self._unix_time()
            self._directory.ordered(standings(self.orders, now))
            self._move_what_is_due(now)
            await self._remove_what_has_passed(now)

    def _move_what_is_due(self, now: float) -> None:
        for order in self.orders:
            due = order.subject == SERVICE and order.move_at is not None and order.move_at <= now
            link = self._links.get(order.site)
            if due and link is not None and order.stands(now):
                link.move_away(self._served_elsewhere(order.site), f"{order.site} was paused by an operator")

    def _served_elsewhere(self, site: str) -> set[str]:
        others = [
            other
            for other in self._directory.sites
            if other.name != site and other.state is SiteState.READY and other.weight > 0
        ]
        mine = next((each.identity for each in self._directory.sites if each.name == site), None)
        return {
            model
            for other in others
            for model in other.identity.models
            if model not in other.pinned_off and (mine is None or same_weights(mine, other.identity, model))
        }

    async def _remove_what_has_passed(self, now: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_WITHIN_S):
                for order in self.orders:
                    if not order.stands(now):
                        with suppress(SQLAlchemyError, OSError):
                            await self._book.expire(order, now)

    def _tell(self, entries: list[Entry]) -> None:
        """What was done at any replica becomes an event here, once."""
        for entry in entries:
            if entry.id not in self._told:
                self._watch.events.add(event_of(entry))
        self._told = {entry.id for entry in entries}


def _verb_text(action: Action) -> str:
    if action.verb is Verb.WEIGHT:
        return f"weight {action.weight:g}"
    return f"{action.verb.value} {action.model}".strip()


def event_of(entry: Entry) -> Event:
    until = ""
    if entry.until_at is not None and entry.until_at > entry.at:
        for_s = entry.until_at - entry.at
        until = f" (for {for_s / 60:.0f} min)" if for_s >= 60 else f" (for {for_s:.0f} s)"
    why = f": {entry.reason}" if entry.reason else ""
    return Event(entry.at, "operator", entry.site, f"{entry.action}{until}{why}", entry.who)
