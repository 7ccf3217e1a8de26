"""`mico pki …`: the sites' certificate authority, a folder of gateways; the database lists what it issued."""

from __future__ import annotations

import asyncio
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.wording import several
from mico.commands.keys import check_name
from mico.errors import CommandFailed
from mico.options import Database, Json
from mico.session import session_of

if TYPE_CHECKING:
    from gateway.store.certificates import RegisteredSite
    from gateway.store.store import Store

SECONDS_A_DAY = 86_400
TIP = "mico pki init makes one; --pki names its folder"

app = typer.Typer(help="Certificates of sites.", no_args_is_help=True)

PkiFolder = Annotated[Path, typer.Option("--pki", envvar="MICO_GATEWAY_PKI", help="The authority's folder.")]
Site = Annotated[str, typer.Argument(callback=check_name, help="The name that the site joins with.")]


@app.command("init")
def init(
    context: typer.Context,
    pki: PkiFolder = Path("pki"),
    name: Annotated[str, typer.Option(help="The authority's name.")] = "Mico sites",
) -> None:
    """Create the authority. Its key belongs on gateways and nowhere else; sites get its certificate."""
    from gateway.security.pki.authority import CERTIFICATE, KEY, Authority, PkiError

    try:
        Authority.create(pki, name, datetime.now(UTC))
    except PkiError as error:
        raise CommandFailed("no authority was made", cause=str(error)) from error
    session_of(context).terminal.info(
        f"{pki / KEY} is secret: for gateways only. Sites need {pki / CERTIFICATE}."
    )


@app.command("invite")
def invite(
    context: typer.Context,
    site: Site,
    pki: PkiFolder = Path("pki"),
    days: Annotated[int, typer.Option(min=1, help="Days that the site may ask for certificates.")] = 365,
) -> None:
    """Create a join secret, with which a site of that name, and no other, gets certificates by itself."""
    from gateway.security.pki import invitation
    from gateway.security.pki.authority import Authority, PkiError

    try:
        key = Authority.open(pki).secret(invitation.PURPOSE)
    except PkiError as error:
        raise CommandFailed("no join secret was made", cause=str(error), tip=TIP) from error
    now = int(time.time())
    invitation_for_site = invitation.Invitation(site, now, now + days * SECONDS_A_DAY)
    session = session_of(context)
    session.terminal.info(
        f"for site {site}, {several(days, 'day')}; give it as join_secret or in join_secret_file:"
    )
    session.terminal.data(invitation.sign(invitation_for_site, key))


@app.command("list")
def list_sites(context: typer.Context, database: Database = None, as_json: Json = False) -> None:
    """List every site that was issued a certificate, also revoked ones."""
    session = session_of(context)

    async def work(store: Store) -> list[RegisteredSite]:
        return await store.certificates.list_sites()

    rows = [certificate_fields(each) for each in session.with_store(database, work)]
    if as_json:
        session.terminal.json(rows)
        return
    columns = ("site", "state", "expires_at", "renewals", "revoked_at", "reason")
    session.terminal.table(columns, [[str(row[column] or "") for column in columns] for row in rows])


@app.command("revoke")
def revoke(
    context: typer.Context,
    site: Site,
    reason: Annotated[str, typer.Option(help="The reason, shown in the list.")] = "",
    database: Database = None,
) -> None:
    """Revoke the certificates and join secrets of a site, or a pool (NAME*). Gateways cut its links.

    The time is the database's, whatever this machine's clock shows.
    """
    session = session_of(context)

    async def work(store: Store) -> tuple[bool, float]:
        issued = [each.site for each in await store.certificates.list_sites()]
        pool = site[:-1] if site.endswith("*") else None
        is_known = any(name == site if pool is None else name.startswith(pool) for name in issued)
        return is_known, await store.certificates.revoke(site, reason)

    is_known, revoked_at = session.with_store(database, work)
    behind_s = revoked_at - time.time()
    session.terminal.info(f"{site} is revoked; mico pki invite {site} lets it back in")
    if not is_known:
        session.terminal.info(f"no certificate was issued to {site}: only its join secrets are void")
    if behind_s > 0:
        again_s = math.ceil(behind_s + 1)  # join secrets are dated in whole seconds
        session.terminal.info(f"this machine's clock is behind: invite it after {again_s} s, not before")


@app.command("renew")
def renew(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="The site's TOML file.")] = None,
) -> None:
    """Get a new certificate now, on a site's machine. A running site takes it up, and renews by itself."""
    from site_engine.config_sources import load
    from site_engine.errors import ConfigError, LinkLost
    from site_engine.federation.dial import identity_of

    async def work() -> str:
        identity = identity_of(load(config, os.environ))
        if identity is None:
            raise ConfigError("identity is not set: this site has no certificate of our authority")
        await identity.renew()
        return f"good for {identity.due_s / 1800:.0f} h"

    try:
        session_of(context).terminal.info(asyncio.run(work()))
    except (ConfigError, LinkLost) as error:
        raise CommandFailed("there is no new certificate", cause=str(error)) from error


def certificate_fields(each: RegisteredSite) -> dict[str, Any]:
    from mico.commands.keys import format_time

    return {
        "site": each.site,
        "state": certificate_state(each, time.time()),
        "serial": each.serial,
        "issued_at": format_time(each.issued_at),
        "expires_at": format_time(each.expires_at),
        "renewals": each.renewals,
        "revoked_at": format_time(each.revoked_at),
        "reason": each.reason,
    }


def certificate_state(each: RegisteredSite, now: float) -> str:
    if each.expires_at is None:
        return "revoked"
    return "ready" if now < each.expires_at else "expired"
