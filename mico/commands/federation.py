"""`mico up`, `mico down`, `mico status`: a federation on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.wording import several
from mico.commands.models import complete_model
from mico.errors import CommandFailed, ExitCode
from mico.options import Json
from mico.session import Session, session_of

if TYPE_CHECKING:
    from mico.local.folder import Running
    from mico.local.plan import Plan

WATCH_INTERVAL_S = 1.0
QUESTION = "Why is the sky blue?"
PLANNED = ("sites", "gateways", "model", "port", "database")
"""The options of `mico up` that say what it starts."""


def up(
    context: typer.Context,
    *,
    sites: Annotated[int | None, typer.Option(min=1, max=32, help="Number of sites. [default: 3]")] = None,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="Number of gateway replicas.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="A name as in mico models list, a folder, a GGUF file or a Hub id. "
            "[default: the built-in demo model]",
            autocompletion=complete_model,
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port, 0 for any free one. [default: 8080]")] = None,
    database: Annotated[
        str | None, typer.Option(help="Database URL, Postgres or SQLite. [default: a file in the folder]")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready.")] = False,
    as_json: Json = False,
) -> None:
    """Start gateways and sites on this machine. Ctrl-C drains and stops everything."""
    from mico.local.interrupts import interrupt_at_end_signals

    session = session_of(context)
    interrupt_at_end_signals()
    session.folder.make()
    with session.folder.locked():
        existing = session.folder.running()
        is_running = existing is not None and any(each.alive for each in existing.processes)
        if existing and is_running:
            session.terminal.info(f"a federation runs here since {existing.started_at}; mico down stops it")
            if unused := [f"--{name}" for name in PLANNED if _is_given(context, name)]:
                session.terminal.info(f"not applied to what runs: {', '.join(unused)}")
            running = restart_dead_sites(session, existing)
        else:
            plan = make_plan(
                session, sites=sites, gateways=gateways, model=model, port=port, database=database
            )
            running = start(session, plan)
    owned = not detach and not is_running
    try:
        print_ready(session, running, as_json=as_json)
        if owned:
            watch_until_interrupted(session, running)
    finally:
        if owned:
            stop_own(session, running)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def down(context: typer.Context) -> None:
    """Stop what `mico up --detach` started here: finish running answers, then end every process."""
    session = session_of(context)
    if session.folder.running() is None:
        session.terminal.info("nothing runs here")
        return
    with session.folder.locked():
        running = session.folder.running()  # again: who had the lock may have stopped or replaced it
        if running is not None:
            stop(session, running)


def status(context: typer.Context, as_json: Json = False) -> None:
    """Show the local federation. Exit status 0: all of it runs, 3: part of it, 1: nothing."""
    from mico.local.federation import states

    session = session_of(context)
    running = session.folder.running()
    if running is None or not any(process.alive for process in running.processes):
        raise CommandFailed("nothing runs here", tip="mico up starts a federation")
    current = states(running, session.folder.key())
    rows = [
        {"name": each.name, "role": each.role, "state": current[each.name], "pid": each.pid, "log": each.log}
        for each in running.processes
    ]
    if as_json:
        session.terminal.json({"base_url": running.base_url, "model": running.model, "processes": rows})
    else:
        session.terminal.info(f"{running.base_url}, since {running.started_at}")
        session.terminal.records(rows)
    if set(current.values()) != {"ready"}:
        raise typer.Exit(ExitCode.PARTLY_FAILED)


def start(session: Session, plan: Plan) -> Running:
    """Start a federation and wait until it is ready; stop it if that fails or is interrupted."""
    from mico.local.database import prepare_database
    from mico.local.federation import start_all, wait_until_ready
    from mico.local.progress import state_progress

    leftover = session.folder.running()
    if leftover:
        stop(session, leftover)
    with session.terminal.spinner("preparing the database"):
        key = prepare_database(session.folder, plan.database_url)
    try:
        running = start_all(plan)
        with state_progress(session.terminal) as show_states:
            wait_until_ready(running, key, show_states)
    except BaseException:
        started = session.folder.running()
        if started:
            stop(session, started)
        raise
    return running


def restart_dead_sites(session: Session, running: Running) -> Running:
    """Restart the dead processes of a running federation and wait until it is ready."""
    from mico.local.federation import restart_dead, wait_until_ready
    from mico.local.progress import state_progress

    running = restart_dead(session.folder, running)
    with state_progress(session.terminal) as show_states:
        wait_until_ready(running, session.folder.key(), show_states)
    return running


def make_plan(
    session: Session,
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

    first = choose_ports(session.settings.value("port", port))
    ports = (first, *(choose_ports(0) for _ in range(gateways - 1)))
    places = tuple(profiles(session.settings.value("sites", sites)))
    database_url = database or session.folder.database_url
    chosen = session.settings.value("up_model", model)
    if chosen:
        return Plan(session.folder, ports, prepare_model(session, chosen), places, database_url)
    return Plan(session.folder, ports, str(demo_model.FOLDER), places, database_url, demo_model.NAME)


def prepare_model(session: Session, model: str) -> str:
    """Return the folder of a model that has to be fetched or converted first; return others as they are.

    A process of its own does it, whose memory is free again before the sites load the model. It shares the
    terminal, and prints why it fails.
    """
    from mico.known_models import cached_folder, is_fetchable

    if not is_fetchable(model):
        return model
    if cached_folder(model) is None:
        quiet = ["--quiet"] if session.terminal.quiet else []
        command = [sys.executable, "-m", "mico", *quiet, "models", "fetch", model]
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if status < 0:
            raise CommandFailed(
                f"{model} was not converted",
                cause=f"signal {-status} ended the conversion",
                tip="the weights need memory of about their size unpacked",
            )
        if status:
            raise typer.Exit(status)
    return str(cached_folder(model) or model)


def watch_until_interrupted(session: Session, own: Running) -> None:
    """Print changes of state until Ctrl-C, or until another federation runs here instead of `own`.

    Raises CommandFailed when every gateway has ended.
    """
    from mico.local.federation import states
    from mico.local.processes import last_lines
    from mico.local.progress import print_changes

    session.terminal.info("Ctrl-C drains and stops everything.")
    show_states = print_changes(session.terminal)
    try:
        while (running := session.folder.running()) and running.started_at == own.started_at:
            show_states(states(running, session.folder.key()))
            if not any(gateway.alive for gateway in running.gateways):
                raise CommandFailed("the gateway ended", cause=last_lines(running.gateways[0].log))
            time.sleep(WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        session.terminal.info("draining; Ctrl-C again stops at once")


def stop_own(session: Session, own: Running) -> None:
    """Stop the federation that this command started, once no other `mico up` or `down` is at work here.

    One that runs here instead by now is left alone. Ctrl-C while the other works stops at once.
    """
    from mico.local.federation import kill_all

    try:
        with session.folder.locked(wait=True):
            current = state_of_own(session, own)
            if current is not None:
                stop(session, current)
    except FileNotFoundError:  # the folder was removed
        stop(session, own)
    except KeyboardInterrupt:
        current = state_of_own(session, own)
        if current is not None:
            kill_all(session.folder, current)


def state_of_own(session: Session, own: Running) -> Running | None:
    """Return the newest state of a federation; None if another one runs here, which ended it before."""
    try:
        current = session.folder.running() or own
    except CommandFailed:  # its file is damaged
        return own
    return current if current.started_at == own.started_at else None


def stop(session: Session, running: Running) -> None:
    """Stop every process in order, or at once at a second Ctrl-C. No process is left either way."""
    from mico.local.federation import kill_all, stop_all

    with session.terminal.spinner("stopping"):
        try:
            killed = stop_all(session.folder, running)
        except KeyboardInterrupt:
            killed = kill_all(session.folder, running)
    for process in killed:
        session.terminal.info(f"{process.name} did not end by itself and was killed; its log: {process.log}")


def print_ready(session: Session, running: Running, *, as_json: bool) -> None:
    client = session.client(running.base_url, session.folder.key())
    models = client.get("/v1/models").objects("data")
    model = models[0]["id"] if models else None
    sites = client.get("/admin/api/sites").objects("sites")
    key = session.folder.key() or ""
    if as_json:
        base_urls = [f"{root_url}/v1" for root_url in running.root_urls]
        facts: dict[str, Any] = {"base_url": running.base_url, "base_urls": base_urls}
        facts |= {"api_key": key, "model": model, "sites": sites}
        session.terminal.json({**facts, "processes": [process_fields(each) for each in running.processes]})
        return
    page = running.base_url.removesuffix("/v1") + "/admin"
    rows = [["gateway", f"{root_url}/v1", "ready"] for root_url in running.root_urls]
    rows += [["dashboard", page, ""]]
    rows += [["API key", key, ""], ["model", model or "none is served now", ""]]
    session.terminal.table(["", "Mico", "state"], rows + [site_row(site) for site in sites])
    if model:
        session.terminal.data("\n" + curl(running, key, model))


def process_fields(process: Any) -> dict[str, object]:
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
