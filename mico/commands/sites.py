"""`mico sites …` and `mico models`: what the gateway knows of its sites now."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from mico.commands.keys import moment
from mico.errors import CommandFailed
from mico.session import ApiKey, BaseUrl, Json, session
from mico.terminal import seconds

app = typer.Typer(help="The sites of the federation.", no_args_is_help=True)


@app.command("list")
def list_sites(
    context: typer.Context, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Every site: where it is, its state, and how loaded it is."""
    here = session(context)
    sites = here.client(base_url, api_key).get("/admin/api/sites")["sites"]
    if as_json:
        here.terminal.json(sites)
    elif sites:
        here.terminal.table(list(row(sites[0])), [list(row(site).values()) for site in sites])
    else:
        here.terminal.say("no site has joined")


@app.command("show")
def show_site(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="As in mico sites list.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Everything the gateway knows of one site."""
    here = session(context)
    sites = here.client(base_url, api_key).get("/admin/api/sites")["sites"]
    site = next((site for site in sites if site["name"] == name), None)
    if site is None:
        names = ", ".join(site["name"] for site in sites) or "none"
        raise CommandFailed(f"there is no site {name}", tip=f"sites now: {names}")
    if as_json:
        here.terminal.json(site)
    else:
        here.terminal.table(["figure", "value"], [[key, plain(value)] for key, value in site.items()])


@app.command("events")
def site_events(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A site's, also of one that is gone.")],
    *,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="The newest so many.")] = 20,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """When a site joined, left and why, what operators did; as every gateway saw it, newest first."""
    here = session(context)
    path = f"/admin/api/sites/{quote(name, safe='')}/events?limit={limit}"
    events = here.client(base_url, api_key).get(path)["events"]
    if as_json:
        here.terminal.json([{**event, "at": moment(event["at"])} for event in events])
    elif events:
        rows = [[moment(each["at"]), each["who"] or each["replica"], each["text"]] for each in events]
        here.terminal.table(["at", "by", "what"], rows)
    else:
        here.terminal.say(f"nothing is kept of a site {name}")


def models(
    context: typer.Context, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """The models that can be asked now."""
    here = session(context)
    found = here.client(base_url, api_key).get("/v1/models")["data"]
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
