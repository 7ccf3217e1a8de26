"""Put together what was spent: priced queries, and the hours of own sites that no query paid for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from gateway.prices import NANO_USD
from gateway.store.queries import OperatorReads, Total, TotalBy
from gateway.store.site_hours import PaidSite, SiteHours

FRESH_S: Final = 60.0
"""For so long sums are shown again without a read: those of a month read every query of it."""


class Spending(NamedTuple):
    """Sums of a period, and the idle remainder of own sites. `idle_nano_usd` is by name where sums are by
    site or by cloud alone, else empty.
    """

    totals: list[Total]
    idle_nano_usd: dict[str, int]
    all_idle_nano_usd: int


async def spending(reads: OperatorReads, hours: SiteHours, by: Sequence[TotalBy], since: float) -> Spending:
    """Sum what was spent since a unix time. What tokens of an own site cost and its idle remainder are its
    paid hours.
    """
    totals = await reads.totals(*by, since=since)
    paid = await hours.paid(since)
    if not paid:
        return Spending(totals, {}, 0)
    priced = {total.name: total.nano_usd for total in await reads.totals(TotalBy.SITE, since=since)}
    idle = [(each, each.nano_usd - priced.get(each.site, 0)) for each in _by_site(paid)]
    names: dict[str, int] = {}
    if len(by) == 1 and by[0] in (TotalBy.SITE, TotalBy.CLOUD):
        for each, nano_usd in idle:
            name = each.site if by[0] is TotalBy.SITE else each.cloud
            names[name] = names.get(name, 0) + nano_usd
    known = {total.name for total in totals}
    totals += [Total((name,), 0, 0, 0) for name in names if name not in known]
    return Spending(totals, names, sum(nano_usd for _, nano_usd in idle))


def _by_site(paid: Sequence[PaidSite]) -> list[PaidSite]:
    """Return one row for each site; one that moved to another cloud is of the last."""
    found: dict[str, PaidSite] = {}
    for each in paid:
        before = found[each.site].nano_usd if each.site in found else 0
        found[each.site] = each._replace(nano_usd=each.nano_usd + before)
    return list(found.values())


def total_facts(by: Sequence[TotalBy], total: Total, idle: dict[str, int]) -> dict[str, Any]:
    """Describe sums as JSON, in dollars."""
    return {
        **dict(zip((each.value for each in by), total.names, strict=True)),
        "name": total.name,
        "queries": total.queries,
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "usd": total.nano_usd / NANO_USD,
        "idle_usd": idle.get(total.name, 0) / NANO_USD,
        "cheapest_usd": total.cheapest_nano_usd / NANO_USD,
        "dearest_usd": total.dearest_nano_usd / NANO_USD,
    }


class CloudSpending:
    """What each cloud cost today and this month (UTC), for the page; read again after FRESH_S."""

    def __init__(self, reads: OperatorReads, hours: SiteHours, clock: Callable[[], float]) -> None:
        self._reads, self._hours, self._clock = reads, hours, clock
        self._read_at = float("-inf")
        self._found: dict[str, Any] = {}

    async def read(self) -> dict[str, Any]:
        """Return the sums as JSON. Raises SQLAlchemy's errors."""
        now = self._clock()
        if not self._read_at <= now < self._read_at + FRESH_S:
            midnight = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            self._found = {
                "today": await self._since(midnight.timestamp()),
                "month": await self._since(midnight.replace(day=1).timestamp()),
            }
            self._read_at = now
        return self._found

    async def _since(self, since: float) -> list[dict[str, Any]]:
        found = await spending(self._reads, self._hours, [TotalBy.CLOUD], since)
        return [total_facts([TotalBy.CLOUD], each, found.idle_nano_usd) for each in found.totals]
