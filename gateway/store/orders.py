"""Store operators' orders for all replicas, each in one transaction with its audit entry."""

from __future__ import annotations

from dataclasses import asdict, replace
from uuid import uuid4

from sqlalchemy import ColumnElement, and_, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.operator_orders import AuditEntry, Order
from gateway.store.audit import Act, key_label
from gateway.store.database import lock_table
from gateway.store.tables import audit, site_orders

EXPIRY = "expired"


class OrderTable:
    """Methods may raise SQLAlchemy's errors: the callers are people and a loop that retries."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def orders(self) -> list[Order]:
        """Return all orders, ended ones too until `expire` removes them."""
        async with self._engine.connect() as connection:
            return [Order(**row._mapping) for row in await connection.execute(select(site_orders))]

    async def entries(self, limit: int, since: float = 0.0) -> list[AuditEntry]:
        """Return the newest audit entries from a unix time on, newest first."""
        newest = select(audit).where(audit.c.at >= since).order_by(audit.c.at.desc(), audit.c.id).limit(limit)
        async with self._engine.connect() as connection:
            return [AuditEntry(**row._mapping) for row in await connection.execute(newest)]

    async def change(
        self, site: str, subject: str, order: Order | None, *, action: str, who: str, reason: str, now: float
    ) -> AuditEntry:
        """Replace the order on this subject by `order`, or lift it when `order` is None.

        `who` is the id of a key; the entry also has the key's name.
        """
        async with self._engine.begin() as connection:
            await lock_table(connection, site_orders)  # two operators may act at once
            who = await key_label(connection, who)
            order = replace(order, who=who) if order is not None else None
            found = await connection.scalar(select(site_orders.c.value).where(_on(site, subject)))
            before = str(found) if found is not None else "default"
            await connection.execute(delete(site_orders).where(_on(site, subject)))
            if order is not None:
                await connection.execute(insert(site_orders), asdict(order))
            entry = AuditEntry(
                id=uuid4().hex,
                at=now,
                who=who,
                site=site,
                action=action,
                reason=reason,
                before=f"{subject}: {before}",
                after=f"{subject}: {order.value if order else 'default'}",
                until_at=order.until_at if order else None,
            )
            await connection.execute(insert(audit), asdict(entry))
        return entry

    async def record(self, site: str, act: Act, *, action: str, after: str, now: float) -> None:
        """Add an audit entry for an act that leaves no order."""
        async with self._engine.begin() as connection:
            who = await key_label(connection, act.who)
            entry = AuditEntry(uuid4().hex, now, who, site, action, act.reason, "", after)
            await connection.execute(insert(audit), asdict(entry))

    async def expire(self, order: Order, now: float) -> None:
        """Remove an order whose time has passed. Of several replicas only one adds the audit entry."""
        same = and_(_on(order.site, order.subject), site_orders.c.given_at == order.given_at)
        async with self._engine.begin() as connection:
            removed = await connection.execute(delete(site_orders).where(same))
            if removed.rowcount:
                reason = f"the time that {order.who} set has passed"
                before, after = f"{order.subject}: {order.value}", f"{order.subject}: default"
                entry = AuditEntry(
                    uuid4().hex, now, order.who, order.site, EXPIRY, reason, before, after, order.until_at
                )
                await connection.execute(insert(audit), asdict(entry))


def _on(site: str, subject: str) -> ColumnElement[bool]:
    return and_(site_orders.c.site == site, site_orders.c.subject == subject)
