"""`mico sites …`: the gateway's current view of its sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from mico.commands.keys import format_time
from mico.errors import CommandFailed
from mico.options import GatewayOptions, Json, Limit, SiteName, with_option_groups
from mico.session import session_of
from mico.terminal import format_seconds

if TYPE_CHECKING:
    from mico.client import Client

app = typer.Typer(help="The sites of the federation.", no_args_is_help=True)


@app.command("list")
@with_option_groups
def list_sites(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """List every site with its place, state and load."""
    session = session_of(context)
    sites = session.client(*gateway).get("/admin/api/sites").objects("sites")
    session.terminal.listing(sites, table_row, "no site has joined", as_json=as_json)


@app.command("show")
@with_option_groups
def show_site(
    context: typer.Context,
    name: SiteName,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Show everything that the gateway knows about one site."""
    session = session_of(context)
    site = find_site(session.client(*gateway), name)
    if as_json:
        session.terminal.json(site)
    else:
        session.terminal.table(
            ["figure", "value"], [[key, format_value(value)] for key, value in site.items()]
        )


@app.command("events")
@with_option_groups
def site_events(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A site's name, also of one that has left.")],
    *,
    limit: Limit = 20,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """List a site's joins and leaves with reasons, and operators' orders, at every gateway; newest first."""
    session = session_of(context)
    path = f"/admin/api/sites/{quote(name, safe='')}/events?limit={limit}"
    client = session.client(*gateway)
    events = client.get(path)["events"]
    if not events:
        find_site(client, name)
    if as_json:
        session.terminal.json([{**event, "at": format_time(event["at"])} for event in events])
    elif events:
        rows = [[format_time(each["at"]), each["who"] or each["replica"], each["text"]] for each in events]
        session.terminal.table(["at", "by", "what"], rows)
    else:
        session.terminal.info(f"nothing is kept of {name}")


def find_site(client: Client, name: str) -> dict[str, Any]:
    """Return what the gateway knows of a site. Raises CommandFailed if it lists none of this name."""
    sites = client.get("/admin/api/sites").objects("sites")
    for site in sites:
        if site["name"] == name:
            return site
    names = ", ".join(site["name"] for site in sites) or "none"
    raise CommandFailed(f"there is no site {name}", tip=f"sites now: {names}")


def table_row(site: dict[str, Any]) -> dict[str, str]:
    capacity, free = site["kv_capacity_tokens"], site["kv_free_tokens"]
    has_load = capacity > 0 and site["state"] != "down"  # who is down holds nothing
    return {
        "site": site["name"],
        "cloud": site["cloud"],
        "region": site["region"],
        "state": site["state"],
        "running": f"{site['running']}/{site['slots']}",
        "pending": str(site["pending"]),
        "token load": f"{site['token_load']:.0f}",
        "tokens/s": f"{site['tokens_per_s']:.0f}",
        "KV used": f"{1 - free / capacity:.0%}" if has_load else "-",
        "report age": format_seconds(site["load_age_s"]),
    }


def format_value(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {each}" for key, each in value.items())
    return ", ".join(map(format_value, value)) if isinstance(value, list) else str(value)
