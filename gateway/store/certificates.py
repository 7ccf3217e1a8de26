"""Keep sites' issued and revoked certificates in memory, so that a joining site does not wait for the
database.

The registry asks the database every REFRESH_S, so a revocation holds on every replica within REFRESH_S +
REFRESH_TIMEOUT_S while the database answers. While it does not, the last known state holds. Of certificates
that ended long ago it keeps the names alone, and what was revoked long ago it does not read again: each
machine of a pool has a name of its own, and all rows stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.store.database import database_time, reason
from gateway.store.errors import StoreUnavailable
from gateway.store.tables import site_certificates as table
from gateway.tasks import cancel

log = logging.getLogger(__name__)

REFRESH_S: Final = 2.0
REFRESH_TIMEOUT_S: Final = 2.0
ENDED_S: Final = 86400.0
"""What ended or was revoked longer ago is read at the start alone, and after so long without a refresh."""
ROWS_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True)
class RegisteredSite:
    """The newest certificate of a site.

    Whatever was issued to the site by `revoked_at` is void. Unix times.
    """

    site: str
    serial: str | None
    issued_at: float | None
    expires_at: float | None
    renewals: int
    revoked_at: float | None
    reason: str


class CertificateRegistry:
    """Certificates by site, refreshed from the database in the background."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock
        self._known: Mapping[str, RegisteredSite] = {}
        self._names: set[str] = set()
        self._read_at = 0.0  # by the database's clock
        self._refreshes = self._newest = 0  # begun, and the number of the one that `_known` is from
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises StoreUnavailable: without a first refresh a revoked site might be admitted."""
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        await cancel(self._task)

    def has(self, site: str) -> bool:
        """Return whether anything was ever issued to a site of this name, or revoked."""
        return site in self._names

    def revoked_until(self, site: str) -> float:
        """Return the time until which whatever was issued to the site is void; -inf if none."""
        known = self._known.get(site)
        return float("-inf") if known is None or known.revoked_at is None else known.revoked_at

    def expires_at(self, site: str) -> float:
        """Return when the newest certificate of the site expires; -inf if there is none."""
        known = self._known.get(site)
        return float("-inf") if known is None or known.expires_at is None else known.expires_at

    async def record_issued(
        self, site: str, *, serial: str, issued_at: float, expires_at: float, renewal: bool
    ) -> None:
        """Record a certificate before it is handed out.

        Raises StoreUnavailable: an unrecorded one is not listed.
        """
        count = table.c.renewals + 1 if renewal else 0
        new = {"serial": serial, "issued_at": issued_at, "expires_at": expires_at}
        async with self._transaction() as connection:
            first = {**new, "renewals": 0, "reason": ""}
            await self._put(connection, site, first, {**new, "renewals": count})
        self._names.add(site)
        await self.refresh()

    async def revoke(self, site: str, why: str) -> float:
        """Void everything issued to the site until now, join secrets too; return the unix time of it.

        A name that ends in `*` also voids what was issued to every site whose name begins so. The time is the
        database's, or later if a gateway whose clock is ahead has issued something. Raises StoreUnavailable.
        """
        async with self._transaction() as connection:
            now = await database_time(connection)
            latest = func.coalesce(table.c.issued_at, now)
            void: dict[str, object] = {
                "serial": None,
                "issued_at": None,
                "expires_at": None,
                "revoked_at": case((latest > now, latest), else_=now),
                "reason": why,
            }
            new = {**void, "renewals": 0, "revoked_at": now}
            await self._put(connection, site, new, void)
            if (members := _pool_members(site)) is not None:
                await connection.execute(update(table).where(members).values(**void))
        await self.refresh()
        return self.revoked_until(site)

    async def list_sites(self) -> list[RegisteredSite]:
        """Return all sites, sorted by name."""
        return await self._read(select(table).order_by(table.c.site))

    async def _read(self, rows: Select[Any]) -> list[RegisteredSite]:
        async with self._engine.connect() as connection:
            return [RegisteredSite(**row._mapping) for row in await connection.execute(rows)]

    async def refresh(self) -> None:
        """Read what is new and may still count; at the start, and after ENDED_S without a refresh, all names.

        Raises StoreUnavailable, and then keeps the last known state.
        """
        self._refreshes += 1
        number = self._refreshes
        async with _in_time(), self._engine.connect() as connection:
            now = await database_time(connection)
            goes_on = 0.0 <= now - self._read_at < ENDED_S  # the clock may have been set, too
            if not goes_on:
                self._names.update(await connection.scalars(select(table.c.site)))
        new = table.c.revoked_at > (self._read_at - ENDED_S if goes_on else 0.0)
        read: dict[str, RegisteredSite] = {}
        async for page in self._pages(new | (table.c.expires_at > self._clock() - ENDED_S)):
            read.update((each.site, each) for each in page)
        self._names.update(read)
        if number < self._newest:
            return  # one that began later has newer rows
        revoked = {name: each for name, each in self._known.items() if each.revoked_at is not None}
        self._known = revoked | read
        self._read_at, self._newest = now, number

    async def _pages(self, counts: ColumnElement[bool]) -> AsyncIterator[list[RegisteredSite]]:
        """Yield the rows that count, so many at a time that each page is read in time."""
        last = ""
        while True:
            rows = select(table).where(counts, table.c.site > last).order_by(table.c.site).limit(ROWS_AT_ONCE)
            async with _in_time():
                page = await self._read(rows)
            yield page
            if len(page) < ROWS_AT_ONCE:
                return
            last = page[-1].site

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        async with _in_time(), self._engine.begin() as connection:
            yield connection

    async def _put(
        self, connection: AsyncConnection, site: str, new: dict[str, object], change: dict[str, object]
    ) -> None:
        """Insert the row of a site, or change it."""
        insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        row = insert(table).values(site=site, **new)
        await connection.execute(row.on_conflict_do_update(index_elements=["site"], set_=change))

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except StoreUnavailable as exc:
                log.warning("certificates are as of the last refresh: %s", exc)
            except Exception:
                log.exception("a refresh of the certificates went wrong in an unforeseen way")


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Give the database REFRESH_TIMEOUT_S to answer. Raises StoreUnavailable."""
    try:
        async with asyncio.timeout(REFRESH_TIMEOUT_S):
            yield
    except TimeoutError as exc:
        raise StoreUnavailable(f"no answer within {REFRESH_TIMEOUT_S:g} s") from exc
    except (SQLAlchemyError, OSError) as exc:
        raise StoreUnavailable(reason(exc)) from exc


def _pool_members(site: str) -> ColumnElement[bool] | None:
    """Match the machines of a pool, if `site` names one. Exact: SQLite's LIKE ignores case."""
    if not site.endswith("*"):
        return None
    begins = site[:-1]
    return func.substr(table.c.site, 1, len(begins)) == begins
