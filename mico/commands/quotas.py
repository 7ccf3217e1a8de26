"""`mico tenants …` and `mico quotas …`: limits of use, written to the database directly and audited."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.commands.keys import audit_act, check_name, format_time
from mico.errors import CommandFailed, ExitCode
from mico.options import AuditReason, Database, Json
from mico.session import session_of

if TYPE_CHECKING:
    from gateway.store.quota_table import Quota, Tenant
    from gateway.store.store import Store

LIFTED = "none"
_DOLLARS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

tenants = typer.Typer(help="Tenants, which pay for keys and share quotas.", no_args_is_help=True)
quotas = typer.Typer(help="Quotas of tenants and keys.", no_args_is_help=True)

Amount = Annotated[str | None, typer.Option(help=f"A number, or {LIFTED} to lift it.")]


@tenants.command("list")
def list_tenants(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """List every tenant."""
    session = session_of(context)

    async def work(store: Store) -> list[Tenant]:
        return await store.quotas.tenants()

    rows = [tenant_fields(tenant) for tenant in session.with_store(database, work)]
    if as_json:
        session.terminal.json(rows)
    else:
        session.terminal.table(
            ("name", "best_priority", "created_at"), [[str(each) for each in row.values()] for row in rows]
        )


@tenants.command("set")
def set_tenant(
    context: typer.Context,
    *,
    name: Annotated[
        str, typer.Argument(callback=check_name, help="The tenant; created if it does not exist.")
    ],
    best_priority: Annotated[
        int | None,
        typer.Option(
            min=-(2**31),
            max=2**31 - 1,
            help="The best priority that its queries may have; it stays if left out, 0 for a new tenant.",
        ),
    ] = None,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Create a tenant, or change its best priority."""
    session = session_of(context)

    async def work(store: Store) -> Tenant:
        return await store.quotas.set_tenant(name, best_priority=best_priority, act=audit_act(reason))

    tenant = session.with_store(database, work)
    if as_json:
        session.terminal.json(tenant_fields(tenant))
    else:
        session.terminal.info(f"{name}: best priority {tenant.best_priority}")


@quotas.command("list")
def list_quotas(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """List every quota and its use."""
    session = session_of(context)

    async def work(store: Store) -> list[Quota]:
        return await store.quotas.quotas()

    print_quotas(context, session.with_store(database, work), as_json=as_json)


@quotas.command("set")
def set_quotas(
    context: typer.Context,
    *,
    tenant: Annotated[str | None, typer.Option(help="The tenant that is limited.")] = None,
    key: Annotated[str | None, typer.Option(help="The id of the key that is limited.")] = None,
    requests_per_min: Amount = None,
    tokens_per_min: Amount = None,
    concurrent_queries: Amount = None,
    tokens_per_month: Amount = None,
    usd_per_month: Annotated[
        str | None, typer.Option(help=f"Dollars by the prices of sites, as 12.50, or {LIFTED} to lift it.")
    ] = None,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Limit a tenant or a key; other limits stay. Effective at every gateway within seconds."""
    given = {
        "requests_per_min": requests_per_min,
        "tokens_per_min": tokens_per_min,
        "concurrent_queries": concurrent_queries,
        "tokens_per_month": tokens_per_month,
        "usd_per_month": usd_per_month,
    }
    limits = {kind: parse_amount(kind, text) for kind, text in given.items() if text is not None}
    if (tenant is None) == (key is None) or not limits:
        tip = "mico quotas set --tenant NAME --tokens-per-min 100000"
        raise CommandFailed("name one tenant or key, and a limit", tip=tip, exit_code=ExitCode.WRONG_USAGE)

    async def work(store: Store) -> list[Quota]:
        from gateway.quotas.limits import Kind, Scope

        scope, subject = (Scope.TENANT, tenant) if tenant is not None else (Scope.KEY, key)
        amounts = {Kind(kind): limit for kind, limit in limits.items()}
        return await store.quotas.set_quotas(scope, subject or "", amounts, audit_act(reason))

    print_quotas(context, session_of(context).with_store(database, work), as_json=as_json)


def parse_amount(kind: str, text: str) -> int | None:
    if text == LIFTED:
        return None
    from gateway.quotas.limits import Kind
    from gateway.store.quota_table import MAX_AMOUNT

    if kind == Kind.BUDGET:
        most_usd = Kind.BUDGET.shown(MAX_AMOUNT)
        if _DOLLARS.fullmatch(text) and float(text) <= most_usd:
            return Kind.BUDGET.counted(float(text))
        wanted = f"dollars such as 12.50, at most {most_usd:.0f}, or {LIFTED}"
        raise CommandFailed(f"--usd-per-month is {wanted}, not {text!r}", exit_code=ExitCode.WRONG_USAGE)
    whole = text.isascii() and text.isdecimal()
    if whole and len(text.lstrip("0")) <= len(str(MAX_AMOUNT)) and int(text) <= MAX_AMOUNT:
        return int(text)
    option, most = "--" + kind.replace("_", "-"), f"at most {MAX_AMOUNT}, "
    wanted = f"a number, {most if whole else ''}or {LIFTED}"
    raise CommandFailed(f"{option} is {wanted}, not {text!r}", exit_code=ExitCode.WRONG_USAGE)


def print_quotas(context: typer.Context, found: list[Quota], *, as_json: bool) -> None:
    session = session_of(context)
    rows: list[dict[str, Any]] = [
        {
            "scope": quota.id.scope.value,
            "subject": quota.id.subject,
            "kind": quota.id.kind.value,
            "amount": quota.id.kind.shown(quota.amount),
            "in_use": quota.id.kind.shown(quota.in_use),
        }
        for quota in found
    ]
    if as_json:
        session.terminal.json(rows)
        return
    shown = ("scope", "subject", "kind", "amount", "in_use")
    session.terminal.table(shown, [[str(row[column]) for column in shown] for row in rows])


def tenant_fields(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "best_priority": tenant.best_priority,
        "created_at": format_time(tenant.created_at),
    }
