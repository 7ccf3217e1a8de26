"""`mico usage` and `mico audit`: usage and operators' changes, read from the database directly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.commands.keys import MAX_DAYS, SECONDS_A_DAY, format_time
from mico.errors import CommandFailed, ExitCode
from mico.options import Database, Json, Limit
from mico.session import session_of

if TYPE_CHECKING:
    from gateway.operator_orders import AuditEntry
    from gateway.store.store import Store

BY = ("tenant", "model", "site", "cloud")
MONEY = ("usd", "idle_usd", "cheapest_usd", "dearest_usd")


def usage(
    context: typer.Context,
    *,
    by: Annotated[
        str, typer.Option(help=f"Added up by {', '.join(BY[:-1])} or {BY[-1]}, or several: a,b.")
    ] = BY[0],
    days: Annotated[float, typer.Option(min=0.01, max=MAX_DAYS, help="Number of days to look back.")] = 30.0,
    money: Annotated[bool, typer.Option(help="What it cost, and would have cost elsewhere.")] = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Sum queries, tokens and money by tenant, model, site or cloud; most tokens first."""
    names = [name.strip() for name in by.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(BY):
        tip = f"choose of {', '.join(BY)}"
        raise CommandFailed(f"--by {by} is not known", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    session = session_of(context)

    async def work(store: Store) -> tuple[list[dict[str, Any]], int]:
        from gateway.store.queries import TotalBy
        from gateway.store.spending import spending, total_facts

        parts = [TotalBy(name) for name in names]
        found = await spending(store.read, store.hours, parts, time.time() - days * SECONDS_A_DAY)
        rows = [total_facts(parts, each, found.idle_nano_usd) for each in found.totals]
        return rows, found.all_idle_nano_usd

    rows, idle_nano_usd = session.with_store(database, work)
    figures = ["queries", "prompt_tokens", "completion_tokens", *(MONEY if money else ())]
    if not money:
        rows = [row for row in rows if row["queries"]]
    if as_json:
        kept = ["name", *(names if money or len(names) > 1 else ()), *figures]
        session.terminal.json([{name: row[name] for name in kept} for row in rows])
        return
    columns = [name.replace("_", " ") for name in (*names, *figures)]
    session.terminal.table(columns, [[_cell(name, row[name]) for name in (*names, *figures)] for row in rows])
    if money and idle_nano_usd:
        from gateway.prices import dollars

        session.terminal.info(f"own sites cost {dollars(idle_nano_usd)} more that no answer paid for: idle")


def _cell(name: str, value: Any) -> str:
    return f"${value:,.6f}" if name in MONEY else str(value) or "none"


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
