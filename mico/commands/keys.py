"""`mico keys …`: API keys, straight in the database, so that the first one needs no key."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mico.errors import CommandFailed
from mico.options import AuditReason, Database, Json, KeyId
from mico.session import Session, session

if TYPE_CHECKING:
    from gateway.store.audit import Act
    from gateway.store.key_table import KeyInfo
    from gateway.store.store import Store

T = TypeVar("T")
SECONDS_A_DAY = 86_400.0
LONGEST_DAYS = 36_500.0
LAST_MOMENT_S = 253_402_300_799.0
"""The end of the year 9999: no later moment can be told."""

app = typer.Typer(help="API keys.", no_args_is_help=True)


def named(name: str) -> str:
    """As the admin API wants names. Raises BadParameter."""
    from gateway.store.key_table import NAME_RULE, is_valid_name

    if not is_valid_name(name):
        raise typer.BadParameter(f"a name has {NAME_RULE}")
    return name


@app.command("create")
def create(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(callback=named, help="Whose it is or what it is for.")],
    tenant: Annotated[str, typer.Option(callback=named, help="Who pays for its use.")] = "default",
    model: Annotated[list[str] | None, typer.Option(help="Allow this model only; repeatable.")] = None,
    region: Annotated[list[str] | None, typer.Option(help="Use sites of this region only.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May also use the admin API.")] = False,
    days: Annotated[
        float | None, typer.Option(min=0.01, max=LONGEST_DAYS, help="Ends by itself after so many days.")
    ] = None,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this once."""
    here = session(context)
    expires_at = None if days is None else time.time() + days * SECONDS_A_DAY

    async def work(store: Store) -> tuple[KeyInfo, str]:
        return await store.keys.create_key(
            name,
            tenant,
            models=model,
            regions=region,
            admin=admin,
            expires_at=expires_at,
            act=act(reason),
        )

    show_once(here, *visit(here, database, work), as_json=as_json)


@app.command("rotate")
def rotate(
    context: typer.Context,
    *,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(help="How long the old key still works: 10m, 1h, 1d.")] = "1d",
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make a key in the place of another, with its scopes and quotas, and show it, this once."""
    from mico.commands.operate import duration

    here, overlap_s = session(context), duration(overlap)

    async def work(store: Store) -> tuple[KeyInfo, str] | None:
        return await store.keys.rotate_key(key_id, overlap_s, act(reason))

    rotated = visit(here, database, work)
    if rotated is None:
        raise CommandFailed(f"there is no valid key {key_id}", tip="mico keys list shows the ids")
    show_once(here, *rotated, as_json=as_json)


def show_once(here: Session, key: KeyInfo, secret: str, *, as_json: bool) -> None:
    if as_json:
        here.terminal.json({**facts(key), "key": secret})
    else:
        here.terminal.say(f"{key.id} for {key.name}; it can't be shown again:")
        here.terminal.data(secret)


@app.command("list")
def list_keys(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """Every key, revoked ones too. Never the keys themselves."""
    here = session(context)

    async def work(store: Store) -> list[KeyInfo]:
        return await store.keys.list_keys()

    rows = [facts(key) for key in visit(here, database, work)]
    if as_json:
        here.terminal.json(rows)
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
    people = [{**row, "expires_at": row["expires_at"] or "never"} for row in rows]
    here.terminal.table(shown, [[cell(row[column]) for column in shown] for row in people])


@app.command("revoke")
def revoke(
    context: typer.Context,
    key_id: KeyId,
    reason: AuditReason = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """End a key. Gateways stop accepting it within seconds."""
    here = session(context)

    async def work(store: Store) -> KeyInfo | None:
        return await store.keys.revoke_key(key_id, act(reason))

    key = visit(here, database, work)
    if key is None:
        raise CommandFailed(f"there is no key {key_id}", tip="mico keys list shows the ids")
    if as_json:
        here.terminal.json(facts(key))
    else:
        here.terminal.say(f"{key.id} ({key.name}) is revoked")


def visit(here: Session, database: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    from mico.store_access import with_store

    return with_store(here.settings.value("database_url", database), here.folder.path, work)


def act(reason: str) -> Act:
    """By whoever has this shell, and can reach the database."""
    from gateway.store.audit import AT_THE_COMMAND_LINE, Act

    return Act(f"{user()} at the {AT_THE_COMMAND_LINE}", reason)


def user() -> str:
    """The name of who runs this, or the number where a container has no name for it."""
    from getpass import getuser

    try:
        return getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def facts(key: KeyInfo) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "hint": f"…{key.hint}",
        "state": state(key),
        "models": None if key.models is None else sorted(key.models),
        "regions": None if key.regions is None else sorted(key.regions),
        "admin": key.admin,
        "created_at": moment(key.created_at),
        "expires_at": moment(key.expires_at),
        "revoked_at": moment(key.revoked_at),
    }


def state(key: KeyInfo) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "ready" if key.valid(time.time()) else "expired"


def moment(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(min(unix_s, LAST_MOMENT_S), UTC).isoformat(timespec="seconds")


def cell(value: Any) -> str:
    if value is None:
        return "all"
    return ", ".join(value) if isinstance(value, list) else str(value)
