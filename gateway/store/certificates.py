"""What was issued to sites and what is void of it, in memory: who joins waits for no database.

Every REFRESH_S the register asks the database, so a revocation holds on every replica within REFRESH_S +
REFRESH_TIMEOUT_S while the database answers. Else what was known last stays true.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Table, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import reason
from gateway.store.errors import StoreUnavailable
from gateway.store.tables import site_certificates as table

log = logging.getLogger(__name__)

REFRESH_S: Final = 2.0
REFRESH_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Registered:
    """One site: its newest certificate, and until when whatever was issued to it is void. Unix times."""

    site: str
    serial: str | None
    issued_at: float | None
    expires_at: float | None
    renewals: int
    revoked_at: float | None
    reason: str


class CertificateRegistry:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: Mapping[str, Registered] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises StoreUnavailable: without a first look a revoked site might be let in."""
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def void_until(self, site: str) -> float:
        """What was issued to it by then is void."""
        known = self._known.get(site)
        return float("-inf") if known is None or known.revoked_at is None else known.revoked_at

    def expires_at(self, site: str) -> float:
        """Of its newest certificate; long ago if there is none."""
        known = self._known.get(site)
        return float("-inf") if known is None or known.expires_at is None else known.expires_at

    async def issued(
        self, site: str, *, serial: str, issued_at: float, expires_at: float, renewal: bool
    ) -> None:
        """Raises StoreUnavailable: a certificate that nobody knows of could not be listed."""
        count = table.c.renewals + 1 if renewal else 0
        new = {"serial": serial, "issued_at": issued_at, "expires_at": expires_at}
        await self._put(site, {**new, "renewals": 0, "reason": ""}, {**new, "renewals": count})

    async def revoke(self, site: str, why: str, now: float) -> None:
        """What was issued to the site by now is void, join secrets too; of a name that ends in `*` also
        what was issued to each site that begins so. Raises StoreUnavailable.
        """
        void: dict[str, object] = {
            "serial": None,
            "issued_at": None,
            "expires_at": None,
            "revoked_at": now,
            "reason": why,
        }
        await self._put(site, {**void, "renewals": 0}, void, _of_pool(site))

    async def every(self) -> list[Registered]:
        async with self._engine.connect() as connection:
            found = await connection.execute(select(table).order_by(table.c.site))
            return [Registered(**row._mapping) for row in found]

    async def refresh(self) -> None:
        """Raises StoreUnavailable, and keeps what was known."""
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                self._known = {each.site: each for each in await self.every()}
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {REFRESH_TIMEOUT_S:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc

    async def _put(
        self,
        site: str,
        new: dict[str, object],
        change: dict[str, object],
        also: ColumnElement[bool] | None = None,
    ) -> None:
        """The row of this site, and the same change of others that are there."""
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S), self._engine.begin() as connection:
                await connection.execute(_upsert(self._engine.dialect.name, table, site, new, change))
                if also is not None:
                    await connection.execute(update(table).where(also).values(**change))
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {REFRESH_TIMEOUT_S:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc
        await self.refresh()

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except StoreUnavailable as exc:
                log.warning("certificates are as of the last look at the database: %s", exc)
            except Exception:
                log.exception("a look at the certificates went wrong in an unforeseen way")


def _of_pool(site: str) -> ColumnElement[bool] | None:
    """The machines of a pool, if this is the name of one: exact, where LIKE would not tell case on SQLite."""
    if not site.endswith("*"):
        return None
    begins = site[:-1]
    return func.substr(table.c.site, 1, len(begins)) == begins


def _upsert(
    dialect: str, into: Table, site: str, new: dict[str, object], change: dict[str, object]
) -> sqlite.Insert | postgresql.Insert:
    insert = sqlite.insert(into) if dialect == "sqlite" else postgresql.insert(into)
    return insert.values(site=site, **new).on_conflict_do_update(index_elements=["site"], set_=change)
