"""Store in which minutes the sites that are paid by the hour were joined, as any replica saw it, and sum what
these minutes cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.domain import SiteIdentity
from gateway.prices import MAX_NANO_USD, NANO_USD
from gateway.store.tables import site_hours

MINUTES_AN_HOUR: Final = 60
MAX_PENDING: Final = 100_000
"""Hours of sites that wait for the database; beyond, the oldest are dropped."""


class PaidSite(NamedTuple):
    site: str
    cloud: str
    nano_usd: int


class SiteHours:
    """A minute counts once, whichever replicas saw the site in it. Methods may raise SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        insert = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        new = insert(site_hours)
        either = site_hours.c.minutes.bitwise_or(new.excluded.minutes)
        self._mark = new.on_conflict_do_update(
            index_elements=[*site_hours.primary_key.columns], set_={"minutes": either}
        )
        self._pending: dict[tuple[str, float, int, str], int] = {}

    async def mark(self, minute: int, identities: Iterable[SiteIdentity]) -> None:
        """Store that these sites were joined in a minute (unix time / 60), with what the database missed."""
        hour, bit = divmod(minute, MINUTES_AN_HOUR)
        for each in identities:
            price = min(MAX_NANO_USD, round(NANO_USD * each.usd_per_hour))
            key = (each.name, hour * 3_600.0, price, each.cloud)
            self._pending[key] = self._pending.get(key, 0) | 1 << bit
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        names = ("site", "hour", "nano_usd_per_hour", "cloud", "minutes")
        waiting = dict(self._pending)
        rows = [dict(zip(names, (*key, minutes), strict=True)) for key, minutes in sorted(waiting.items())]
        if not rows:
            return
        async with self._engine.begin() as connection:
            await connection.execute(self._mark, rows)
        self._pending = {key: bits for key, bits in self._pending.items() if waiting.get(key) != bits}

    async def paid(self, since: float) -> list[PaidSite]:
        """Return what each site cost from `since` (unix time) on, the part of a minute included."""
        first_minute, begun_s = divmod(int(since), 60)
        rows = select(site_hours).where(site_hours.c.hour >= since // 3_600 * 3_600)
        sums: dict[tuple[str, str], int] = {}
        async with self._engine.connect() as connection:
            for row in await connection.execute(rows):
                before = first_minute - int(row.hour) // 60
                minutes = row.minutes >> max(0, before)
                paid_s = 60 * minutes.bit_count() - (begun_s if before >= 0 and minutes & 1 else 0)
                key = (row.site, row.cloud)
                sums[key] = sums.get(key, 0) + paid_s * row.nano_usd_per_hour
        return [PaidSite(*key, total // 3_600) for key, total in sorted(sums.items())]
