"""`mico tenants …` and `mico quotas …`: who may use how much, straight in the database, audited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.commands.keys import act, moment, named, visit
from mico.errors import CommandFailed, ExitCode
from mico.options import AuditReason, Database, Json
from mico.session import session

if TYPE_CHECKING:
    from gateway.store.quota_table import Quota, Tenant
    from gateway.store.store import Store

LIFTED = "none"

tenants = typer.Typer(help="Tenants: who pays for keys, and shares quotas and turns.", no_args_is_help=True)
quotas = typer.Typer(help="Quotas of tenants and keys.", no_args_is_help=True)

Amount = Annotated[str | None, typer.Option(help=f"A number, or {LIFTED} to lift it.")]


@tenants.command("list")
def list_tenants(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """Every tenant."""
    here = session(context)

    async def work(store: Store) -> list[Tenant]:
        return await store.quotas.tenants()

    rows = [tenant_facts(tenant) for tenant in visit(here, database, work)]
    if as_json:
        here.terminal.json(rows)
    else:
        here.terminal.table(
            ("name", "best_priority", "created_at"), [[str(each) for each in row.values()] for row in rows]
        )


@tenants.command("set")
def set_tenant(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(callback=named, help="Made if it is not there yet.")],
    best_priority: Annotated[
        int, typer.Option(min=-(2**31), max=2**31 - 1, help="No query of it goes before others of this one.")
    ] = 0,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make a tenant, or change what it may."""
    here = session(context)

    async def work(store: Store) -> Tenant:
        return await store.quotas.set_tenant(name, best_priority=best_priority, act=act(reason))

    facts = tenant_facts(visit(here, database, work))
    if as_json:
        here.terminal.json(facts)
    else:
        here.terminal.say(f"{name}: best priority {best_priority}")


@quotas.command("list")
def list_quotas(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """Every quota, and how much of it is in use."""
    here = session(context)

    async def work(store: Store) -> list[Quota]:
        return await store.quotas.quotas()

    tell(context, visit(here, database, work), as_json=as_json)


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
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Limit a tenant or a key. What is not named stays as it is. Holds at every gateway within seconds."""
    given = {
        "requests_per_min": requests_per_min,
        "tokens_per_min": tokens_per_min,
        "concurrent_queries": concurrent_queries,
        "tokens_per_month": tokens_per_month,
    }
    limits = {kind: amount(kind, text) for kind, text in given.items() if text is not None}
    if (tenant is None) == (key is None) or not limits:
        tip = "mico quotas set --tenant NAME --tokens-per-min 100000"
        raise CommandFailed("name one tenant or key, and a limit", tip=tip, exit_code=ExitCode.WRONG_USAGE)

    async def work(store: Store) -> list[Quota]:
        from gateway.quotas.limits import Kind, Scope

        scope, subject = (Scope.TENANT, tenant) if tenant is not None else (Scope.KEY, key)
        amounts = {Kind(kind): limit for kind, limit in limits.items()}
        return await store.quotas.set_quotas(scope, subject or "", amounts, act(reason))

    tell(context, visit(session(context), database, work), as_json=as_json)


def amount(kind: str, text: str) -> int | None:
    if text == LIFTED:
        return None
    from gateway.store.quota_table import MAX_AMOUNT

    whole = text.isascii() and text.isdecimal()
    if whole and len(text.lstrip("0")) <= len(str(MAX_AMOUNT)) and int(text) <= MAX_AMOUNT:
        return int(text)
    option, most = "--" + kind.replace("_", "-"), f"at most {MAX_AMOUNT}, "
    wanted = f"a number, {most if whole else ''}or {LIFTED}"
    raise CommandFailed(f"{option} is {wanted}, not {text!r}", exit_code=ExitCode.WRONG_USAGE)


def tell(context: typer.Context, found: list[Quota], *, as_json: bool) -> None:
    here = session(context)
    rows: list[dict[str, Any]] = [
        {
            "scope": quota.id.scope.value,
            "subject": quota.id.subject,
            "kind": quota.id.kind.value,
            "amount": quota.amount,
            "in_use": quota.in_use,
        }
        for quota in found
    ]
    if as_json:
        here.terminal.json(rows)
        return
    shown = ("scope", "subject", "kind", "amount", "in_use")
    here.terminal.table(shown, [[str(row[column]) for column in shown] for row in rows])


def tenant_facts(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "best_priority": tenant.best_priority,
        "created_at": moment(tenant.created_at),
    }
