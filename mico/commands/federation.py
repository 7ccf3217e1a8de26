"""`mico up`, `mico down`, `mico status`: a federation on this machine."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.options import Json
from mico.session import Session, session

if TYPE_CHECKING:
    from mico.local.folder import Running
    from mico.local.plan import Plan

WATCH_EVERY_S = 1.0
QUESTION = "Why is the sky blue?"


def up(
    context: typer.Context,
    *,
    sites: Annotated[int | None, typer.Option(min=1, max=32, help="How many sites. [default: 3]")] = None,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="How many gateway replicas.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="A folder or Hub id. [default: the built-in demo model]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port, 0 for any free one. [default: 8080]")] = None,
    database: Annotated[
        str | None, typer.Option(help="Its address, Postgres or SQLite. [default: a file in the folder]")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready.")] = False,
    as_json: Json = False,
) -> None:
    """Start gateways and sites on this machine. Ctrl-C drains and leaves nothing running."""
    from mico.local.interrupts import interrupt_at_any_end

    here = session(context)
    interrupt_at_any_end()
    here.folder.make()
    with here.folder.locked():
        already = here.folder.running()
        runs_already = already is not None and any(each.alive for each in already.processes)
        if already and runs_already:
            here.terminal.say(f"a federation runs here since {already.started_at}; mico down stops it")
            running = mend(here, already)
        else:
            plan = planned(here, sites=sites, gateways=gateways, model=model, port=port, database=database)
            running = begin(here, plan)
    ours = not detach and not runs_already
    try:
        show_ready(here, running, as_json=as_json)
        if ours:
            stay(here)
    finally:
        if ours:
            end(here, here.folder.running() or running)


def down(context: typer.Context) -> None:
    """Stop what `mico up --detach` started here: finish what is being answered, then end every process."""
    here = session(context)
    running = here.folder.running()
    if running is None:
        here.terminal.say("nothing runs here")
        return
    with here.folder.locked():
        end(here, running)


def status(context: typer.Context, as_json: Json = False) -> None:
    """What runs here. Exit status 0: all of it, 3: part of it, 1: nothing."""
    from mico.local.federation import states

    here = session(context)
    running = here.folder.running()
    if running is None or not any(process.alive for process in running.processes):
        raise CommandFailed("nothing runs here", tip="mico up starts a federation")
    now = states(running, here.folder.key())
    rows = [
        {"name": each.name, "role": each.role, "state": now[each.name], "pid": each.pid, "log": each.log}
        for each in running.processes
    ]
    if as_json:
        here.terminal.json({"base_url": running.base_url, "model": running.model, "processes": rows})
    else:
        here.terminal.say(f"{running.base_url}, since {running.started_at}")
        here.terminal.table(list(rows[0]), [list(row.values()) for row in rows])
    if set(now.values()) != {"ready"}:
        raise typer.Exit(ExitCode.PARTLY_FAILED)


def begin(here: Session, plan: Plan) -> Running:
    """A federation with every site ready; when that fails, or is interrupted, nothing is left running."""
    from mico.local.database import prepare
    from mico.local.federation import start_all, wait_until_ready
    from mico.local.progress import progress

    left = here.folder.running()
    if left:
        end(here, left)
    with here.terminal.spinner("preparing the database"):
        key = prepare(here.folder, plan.database_url)
    try:
        running = start_all(plan)
        with progress(here.terminal) as tell:
            wait_until_ready(running, key, tell)
    except BaseException:
        started = here.folder.running()
        if started:
            end(here, started)
        raise
    return running


def mend(here: Session, running: Running) -> Running:
    """What runs already, with every dead site started again."""
    from mico.local.federation import restart_dead, wait_until_ready
    from mico.local.progress import progress

    running = restart_dead(here.folder, running)
    with progress(here.terminal) as tell:
        wait_until_ready(running, here.folder.key(), tell)
    return running


def planned(
    here: Session,
    *,
    sites: int | None,
    gateways: int,
    model: str | None,
    port: int | None,
    database: str | None,
) -> Plan:
    from mico import demo_model
    from mico.local.plan import Plan, choose_ports
    from mico.local.profiles import profiles

    first = choose_ports(here.settings.value("port", port))
    ports = (first, *(choose_ports(0) for _ in range(gateways - 1)))
    places = tuple(profiles(here.settings.value("sites", sites)))
    database_url = database or here.folder.database_url
    chosen = here.settings.value("up_model", model)
    if chosen:
        return Plan(here.folder, ports, chosen, places, database_url)
    return Plan(here.folder, ports, str(demo_model.FOLDER), places, database_url, demo_model.NAME)


def stay(here: Session) -> None:
    """Say what changes until Ctrl-C, then drain. Ends by itself, as a failure, when the gateway does."""
    from mico.local.federation import states
    from mico.local.processes import last_lines
    from mico.local.progress import changes

    here.terminal.say("Ctrl-C drains and stops everything.")
    tell = changes(here.terminal)
    try:
        while running := here.folder.running():
            tell(states(running, here.folder.key()))
            if not any(gateway.alive for gateway in running.gateways):
                raise CommandFailed("the gateway ended", cause=last_lines(running.gateways[0].log))
            time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        here.terminal.say("draining; Ctrl-C again stops at once")


def end(here: Session, running: Running) -> None:
    """Orderly; at a second Ctrl-C at once. Either way no process is left."""
    from mico.local.federation import kill_all, stop_all

    with here.terminal.spinner("stopping"):
        try:
            killed = stop_all(here.folder, running)
        except KeyboardInterrupt:
            killed = kill_all(here.folder, running)
    for process in killed:
        here.terminal.say(f"{process.name} did not end by itself and was killed; its log: {process.log}")


def show_ready(here: Session, running: Running, *, as_json: bool) -> None:
    client = here.client(running.base_url, here.folder.key())
    models = client.get("/v1/models")["data"]
    model = models[0]["id"] if models else None
    sites = client.get("/admin/api/sites")["sites"]
    key = here.folder.key() or ""
    if as_json:
        base_urls = [f"{root_url}/v1" for root_url in running.root_urls]
        facts: dict[str, Any] = {"base_url": running.base_url, "base_urls": base_urls}
        facts |= {"api_key": key, "model": model, "sites": sites}
        here.terminal.json({**facts, "processes": [process_facts(each) for each in running.processes]})
        return
    page = running.base_url.removesuffix("/v1") + "/admin"
    facts_rows = [["gateway", f"{root_url}/v1", "ready"] for root_url in running.root_urls]
    facts_rows += [["dashboard", page, ""]]
    facts_rows += [["API key", key, ""], ["model", model or "none is served now", ""]]
    here.terminal.table(["", "Mico", "state"], facts_rows + [site_row(site) for site in sites])
    if model:
        here.terminal.data("\n" + curl(running, key, model))


def process_facts(process: Any) -> dict[str, object]:
    return {"name": process.name, "role": process.role, "pid": process.pid, "log": process.log}


def site_row(site: dict[str, Any]) -> list[str]:
    return [
        site["name"],
        f"{site['cloud']} {site['region']}, {several(site['slots'], 'slot')}",
        site["state"],
    ]


def curl(running: Running, key: str, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    return (
        f"curl {running.base_url}/chat/completions \\\n"
        f"  -H 'authorization: Bearer {key}' -H 'content-type: application/json' \\\n"
        f"  -d '{body}'"
    )
