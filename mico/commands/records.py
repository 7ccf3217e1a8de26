"""`mico usage` and `mico audit`: usage and operators' changes, read from the database directly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from mico.commands.keys import SECONDS_A_DAY, format_time
from mico.errors import CommandFailed, ExitCode
from mico.options import Database, Json, Limit
from mico.session import session_of

if TYPE_CHECKING:
    from gateway.operator_orders import AuditEntry
    from gateway.store.queries import Total
    from gateway.store.store import Store

BY = ("tenant", "model", "site", "cloud")


def usage(
    context: typer.Context,
    *,
    by: Annotated[str, typer.Option(help=f"Added up by {', '.join(BY[:-1])} or {BY[-1]}.")] = BY[0],
    days: Annotated[float, typer.Option(min=0.01, help="Number of days to look back.")] = 30.0,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Sum queries and tokens by tenant, model, site or cloud; most tokens first."""
    import msgspec

    if by not in BY:
        tip = f"choose of {', '.join(BY)}"
        raise CommandFailed(f"--by {by} is not known", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    session = session_of(context)

    async def work(store: Store) -> list[Total]:
        from gateway.store.queries import TotalBy

        return await store.read.totals(TotalBy(by), since=time.time() - days * SECONDS_A_DAY)

    rows = msgspec.to_builtins(session.with_store(database, work))
    if as_json:
        session.terminal.json(rows)
    else:
        columns = (by, "queries", "prompt tokens", "completion tokens")
        session.terminal.table(columns, [[str(each) or "none" for each in row.values()] for row in rows])


def audit(
    context: typer.Context,
    *,
    limit: Limit = 20,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List every change by an operator, newest first: who, why, before and after."""
    import msgspec

    session = session_of(context)

    async def work(store: Store) -> list[AuditEntry]:
        return await store.orders.entries(limit)

    entries = session.with_store(database, work)
    if as_json:
        rows = [{**msgspec.to_builtins(each), "at": format_time(each.at)} for each in entries]
        session.terminal.json([{**row, "until_at": format_time(row["until_at"])} for row in rows])
        return
    shown = [
        (
            format_time(each.at),
            each.who,
            f"{each.site} {each.action}".strip(),
            each.before,
            each.after,
            each.reason,
        )
        for each in entries
    ]
    session.terminal.table(("at", "who", "what", "before", "after", "reason"), shown)
