"""Write audit entries: who changed what and why, in one transaction with the change."""

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
    """Author of a change and the reason. `who` is the id of a key, or AT_THE_COMMAND_LINE."""

    who: str = AT_THE_COMMAND_LINE
    reason: str = ""


async def add_entry(
    connection: AsyncConnection, act: Act, now: float, *, action: str, before: str, after: str
) -> None:
    """Add an entry to the audit, in the open transaction."""
    who = await key_label(connection, act.who)
    entry = AuditEntry(uuid4().hex, now, who, "", action, act.reason, before, after)
    await connection.execute(insert(audit), asdict(entry))


async def key_label(connection: AsyncConnection, key_id: str) -> str:
    """Return the key's name and id for display, or `key_id` as it is when no key has that id."""
    name = await connection.scalar(select(keys.c.name).where(keys.c.id == key_id))
    return f"{name} ({key_id})" if name else key_id
