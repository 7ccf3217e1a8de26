"""`mico drill …`: break the local federation on purpose, and watch the dashboard show it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.session import Session, session_of

if TYPE_CHECKING:
    from threading import Event

    from mico.local.folder import Running
    from mico.local.processes import Process

app = typer.Typer(help="Rehearse trouble on the local federation.", no_args_is_help=True)

Site = Annotated[str | None, typer.Argument(help="A site's name. [default: the busiest site]")]
For = Annotated[str, typer.Option("--for", help="Duration, such as 20s.")]


@app.command("kill-site")
def kill_site(context: typer.Context, site: Site = None) -> None:
    """Kill a site like a crash. The dashboard shows it down at once; its queries continue elsewhere."""
    session = session_of(context)
    process = select_site(session, site)
    os.kill(process.pid, signal.SIGKILL)
    session.terminal.info(f"killed {process.name}; mico up --detach starts it again")


@app.command("stale")
def stale(context: typer.Context, site: Site = None, lasts: For = "20s") -> None:
    """Let a site hang: it keeps its connections and is silent."""
    from mico.commands.operate import duration
    from mico.local.interrupts import interrupt_at_end_signals

    session, lasts_s = session_of(context), duration(lasts)
    process = select_site(session, site)
    interrupt_at_end_signals()  # whatever ends the drill, the site goes on
    with suspended(process):
        session.terminal.info(f"{process.name} hangs for {lasts}; Ctrl-C lets it go on")
        sleep_until_interrupted(lasts_s)
    session.terminal.info(f"{process.name} goes on and joins again")


@app.command("overload")
def overload(
    context: typer.Context,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Number of clients that ask at once.")] = 40,
    lasts: For = "20s",
) -> None:
    """Ask more than the federation can answer at once. The dashboard shows loaded sites and queues."""
    from concurrent.futures import ThreadPoolExecutor, wait
    from threading import Event

    from mico.commands.operate import duration

    session = session_of(context)
    federation = require_running(session)
    until_s = time.monotonic() + duration(lasts)
    session.terminal.info(f"{several(clients, 'client asks', 'clients ask')} for {lasts}; Ctrl-C ends it")
    key, ended = session.folder.key(), Event()
    with ThreadPoolExecutor(clients) as pool:
        clients_running = [
            pool.submit(send_until, federation.base_url, key, until_s, ended) for _ in range(clients)
        ]
        try:
            wait(clients_running)
        except KeyboardInterrupt:
            session.terminal.info("no more is asked; answers that are under way end")
        finally:
            ended.set()
    counts = [each.result() for each in clients_running]
    done, refused = (sum(column) for column in zip(*counts, strict=True))
    session.terminal.info(f"{done} answered, {refused} refused")


def send_until(base_url: str, key: str | None, until_s: float, ended: Event) -> tuple[int, int]:
    """Send queries until a time or `ended`; return the numbers of answered and refused ones."""
    from mico.client import Client
    from mico.commands.chat import first_model

    client, done, refused = Client(base_url, key), 0, 0
    model = first_model(client)
    question = [{"role": "user", "content": "Tell me all you know about rivers. " * 4}]
    body = {"model": model, "messages": question, "max_tokens": 80}
    while time.monotonic() < until_s and not ended.is_set():
        try:
            client.post("/v1/chat/completions", body)
            done += 1
        except CommandFailed:
            refused += 1
    client.http.close()
    return done, refused


@contextmanager
def suspended(process: Process) -> Iterator[None]:
    """Suspend a process during the block, and always resume it afterwards."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def sleep_until_interrupted(seconds: float) -> None:
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return


def require_running(session: Session) -> Running:
    found = session.folder.running()
    if found is None or not any(gateway.alive for gateway in found.gateways):
        raise CommandFailed("no federation runs here", tip="mico up --detach starts one")
    return found


def select_site(session: Session, name: str | None) -> Process:
    """Return the process of a site that lives here, without a name the one with the most queries.

    Raises CommandFailed.
    """
    federation = require_running(session)
    alive = {process.name: process for process in federation.sites if process.alive}
    chosen = alive.get(name or busiest(list_sites(session, federation), list(alive)))
    if chosen is None:
        raise CommandFailed(
            f"no site {name} runs here" if name else "no site runs here",
            tip=f"sites: {', '.join(alive) or 'none'}",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return chosen


def list_sites(session: Session, federation: Running) -> Sequence[Mapping[str, Any]]:
    return session.client(federation.base_url, None).get("/admin/api/sites").objects("sites")


def busiest(sites: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return which of `names` has the most queries assigned, the first of equals; empty without names."""
    assigned = {site["name"]: site["assigned"] for site in sites}
    return max(names, key=lambda name: assigned.get(name, 0), default="")
