"""The audit: what was done goes into the database in one transaction with who, why, before and after."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple
from uuid import uuid4

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.operator_orders import AuditEntry
from gateway.store.tables import audit, keys

AT_THE_COMMAND_LINE = "command line"


class Act(NamedTuple):
    """Who does it and why. `who` is the id of a key, or says that it came by the command line."""

    who: str = AT_THE_COMMAND_LINE
    reason: str = ""


async def note(
    connection: AsyncConnection, act: Act, now: float, *, action: str, before: str, after: str
) -> None:
    who = await signature(connection, act.who)
    entry = AuditEntry(uuid4().hex, now, who, "", action, act.reason, before, after)
    await connection.execute(insert(audit), asdict(entry))


async def signature(connection: AsyncConnection, key_id: str) -> str:
    """The key's name beside its id, for people."""
    name = await connection.scalar(select(keys.c.name).where(keys.c.id == key_id))
    return f"{name} ({key_id})" if name else key_id
