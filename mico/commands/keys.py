"""`mico keys …`: API keys, written to the database directly, so that the first one needs no key."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.errors import CommandFailed
from mico.options import AuditReason, Database, Json, KeyId
from mico.session import Session, session_of

if TYPE_CHECKING:
    from gateway.store.audit import Act
    from gateway.store.key_table import KeyInfo
    from gateway.store.store import Store

SECONDS_A_DAY = 86_400.0
MAX_DAYS = 36_500.0
MAX_TIME_S = 253_402_300_799.0
"""The end of the year 9999, the last time that datetime can format."""

app = typer.Typer(help="API keys.", no_args_is_help=True)


def check_name(name: str) -> str:
    """Return a name that the admin API accepts. Raises BadParameter for another."""
    from gateway.store.key_table import NAME_RULE, is_valid_name

    if not is_valid_name(name):
        raise typer.BadParameter(f"a name has {NAME_RULE}")
    return name


def check_names(names: list[str] | None) -> list[str] | None:
    return names and [check_name(name) for name in names]


@app.command("create")
def create(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(callback=check_name, help="The key's name: its owner or purpose.")],
    tenant: Annotated[
        str,
        typer.Option(
            callback=check_name, help="The tenant that pays; created, without quotas, if it is new."
        ),
    ] = "default",
    model: Annotated[
        list[str] | None, typer.Option(callback=check_names, help="Allow this model only; repeatable.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(callback=check_names, help="Use sites of this region only; repeatable."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May also use the admin API.")] = False,
    days: Annotated[
        float | None, typer.Option(min=0.01, max=MAX_DAYS, help="Expires after this many days.")
    ] = None,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Create a key and show it, only this once."""
    session = session_of(context)
    expires_at = None if days is None else time.time() + days * SECONDS_A_DAY

    async def work(store: Store) -> tuple[KeyInfo, str]:
        await warn_of_another_pepper(session, store)
        return await store.keys.create_key(
            name,
            tenant,
            models=model,
            regions=region,
            admin=admin,
            expires_at=expires_at,
            act=audit_act(reason),
        )

    show_once(session, *session.with_store(database, work), as_json=as_json)


@app.command("rotate")
def rotate(
    context: typer.Context,
    *,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="Time that the old key still works: 10m, 1h, 1d.")] = "1d",
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Replace a key by a new one with its scopes and quotas, and show it, only this once."""
    from mico.commands.operate import duration

    session, overlap_s = session_of(context), duration(overlap)

    async def work(store: Store) -> tuple[KeyInfo, str] | None:
        return await store.keys.rotate_key(key_id, overlap_s, audit_act(reason))

    rotated = session.with_store(database, work)
    if rotated is None:
        raise CommandFailed(f"there is no valid key {key_id}", tip="mico keys list shows the ids")
    show_once(session, *rotated, as_json=as_json)


async def warn_of_another_pepper(session: Session, store: Store) -> None:
    """Say that no gateway may take a key that is made here: all others were made with another pepper."""
    from mico.store_access import PEPPER_TIP

    await store.keys.refresh()
    if store.keys.all_foreign:
        session.terminal.info("warning: every key there is was made with another pepper than the one here;")
        session.terminal.info(f"a gateway that takes those will not take this one. {PEPPER_TIP}")


def show_once(session: Session, key: KeyInfo, secret: str, *, as_json: bool) -> None:
    if as_json:
        session.terminal.json({**key_fields(key), "key": secret})
    else:
        session.terminal.info(f"{key.id} for {key.name}; it can't be shown again:")
        session.terminal.data(secret)


@app.command("list")
def list_keys(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """List every key, also revoked ones, but never the secrets."""
    session = session_of(context)

    async def work(store: Store) -> list[KeyInfo]:
        return await store.keys.list_keys()

    rows = [key_fields(key) for key in session.with_store(database, work)]
    if as_json:
        session.terminal.json(rows)
        return
    shown = (
        "id",
        "name",
        "tenant",
        "hint",
        "state",
        "models",
        "regions",
        "admin",
        "created_at",
        "expires_at",
    )
    rows_for_people = [{**row, "expires_at": row["expires_at"] or "never"} for row in rows]
    session.terminal.table(shown, [[format_cell(row[column]) for column in shown] for row in rows_for_people])


@app.command("revoke")
def revoke(
    context: typer.Context,
    key_id: KeyId,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Revoke a key. Gateways stop accepting it within seconds."""
    session = session_of(context)

    async def work(store: Store) -> KeyInfo | None:
        return await store.keys.revoke_key(key_id, audit_act(reason))

    key = session.with_store(database, work)
    if key is None:
        raise CommandFailed(f"there is no key {key_id}", tip="mico keys list shows the ids")
    if as_json:
        session.terminal.json(key_fields(key))
    else:
        session.terminal.info(f"{key.id} ({key.name}) is revoked")


def audit_act(reason: str) -> Act:
    """Return the audit's record of an act by the user of this shell."""
    from gateway.operator_orders import clean_reason
    from gateway.store.audit import AT_THE_COMMAND_LINE, Act

    return Act(f"{user_name()} at the {AT_THE_COMMAND_LINE}", clean_reason(reason))


def user_name() -> str:
    """Return the name of the current user, or the number where a container has no name for it."""
    from getpass import getuser

    try:
        return getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def key_fields(key: KeyInfo) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "hint": f"…{key.hint}",
        "state": key_state(key),
        "models": None if key.models is None else sorted(key.models),
        "regions": None if key.regions is None else sorted(key.regions),
        "admin": key.admin,
        "created_at": format_time(key.created_at),
        "expires_at": format_time(key.expires_at),
        "revoked_at": format_time(key.revoked_at),
    }


def key_state(key: KeyInfo) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "ready" if key.valid(time.time()) else "expired"


def format_time(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(min(unix_s, MAX_TIME_S), UTC).isoformat(timespec="seconds")


def format_cell(value: Any) -> str:
    if value is None:
        return "all"
    return ", ".join(value) if isinstance(value, list) else str(value)
