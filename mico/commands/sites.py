"""`mico sites …` and `mico models`: what the gateway knows of its sites now."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from mico.commands.keys import moment
from mico.errors import CommandFailed
from mico.options import GatewayOptions, Json, Limit, SiteName, with_option_groups
from mico.session import session
from mico.terminal import seconds

app = typer.Typer(help="The sites of the federation.", no_args_is_help=True)


@app.command("list")
@with_option_groups
def list_sites(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Every site: where it is, its state, and how loaded it is."""
    here = session(context)
    sites = here.client(*gateway).get("/admin/api/sites")["sites"]
    if as_json:
        here.terminal.json(sites)
    elif sites:
        here.terminal.table(list(row(sites[0])), [list(row(site).values()) for site in sites])
    else:
        here.terminal.say("no site has joined")


@app.command("show")
@with_option_groups
def show_site(
    context: typer.Context,
    name: SiteName,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Everything the gateway knows of one site."""
    here = session(context)
    sites = here.client(*gateway).get("/admin/api/sites")["sites"]
    site = next((site for site in sites if site["name"] == name), None)
    if site is None:
        names = ", ".join(site["name"] for site in sites) or "none"
        raise CommandFailed(f"there is no site {name}", tip=f"sites now: {names}")
    if as_json:
        here.terminal.json(site)
    else:
        here.terminal.table(["figure", "value"], [[key, plain(value)] for key, value in site.items()])


@app.command("events")
@with_option_groups
def site_events(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A site's, also of one that is gone.")],
    *,
    limit: Limit = 20,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """When a site joined, left and why, what operators did; as every gateway saw it, newest first."""
    here = session(context)
    path = f"/admin/api/sites/{quote(name, safe='')}/events?limit={limit}"
    events = here.client(*gateway).get(path)["events"]
    if as_json:
        here.terminal.json([{**event, "at": moment(event["at"])} for event in events])
    elif events:
        rows = [[moment(each["at"]), each["who"] or each["replica"], each["text"]] for each in events]
        here.terminal.table(["at", "by", "what"], rows)
    else:
        here.terminal.say(f"nothing is kept of a site {name}")


@with_option_groups
def models(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """The models that can be asked now."""
    here = session(context)
    found = here.client(*gateway).get("/v1/models")["data"]
    if as_json:
        here.terminal.json(found)
        return
    rows = [[model["id"], model.get("max_model_len", "-"), model["owned_by"]] for model in found]
    here.terminal.table(["model", "context tokens", "owned by"], rows)


def row(site: dict[str, Any]) -> dict[str, str]:
    capacity, free = site["kv_capacity_tokens"], site["kv_free_tokens"]
    told = capacity > 0 and site["state"] != "down"  # who is down holds nothing
    return {
        "site": site["name"],
        "cloud": site["cloud"],
        "region": site["region"],
        "state": site["state"],
        "running": f"{site['running']}/{site['slots']}",
        "pending": str(site["pending"]),
        "token load": f"{site['token_load']:.0f}",
        "tokens/s": f"{site['tokens_per_s']:.0f}",
        "KV used": f"{1 - free / capacity:.0%}" if told else "-",
        "report age": seconds(site["load_age_s"]),
    }


def plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
