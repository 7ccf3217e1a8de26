"""`mico doctor`: what has to be right on this machine, and the command that repairs what is not."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import Session, session

LOW_DISK_BYTES = 2 * 2**30
CLOCKS_WITHIN_S = 1.0


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`repair` is the command that mends it; empty when nothing is to be done."""

    subject: str
    verdict: Verdict
    detail: str
    repair: str = ""


@with_option_groups
def doctor(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Look at this machine and at the federation: each line ok, warn or fail, with the repair."""
    here = session(context)
    findings = [*machine(here), *local(here), *federation(here, gateway)]
    if as_json:
        here.terminal.json([asdict(finding) for finding in findings])
    else:
        here.terminal.table(
            ["subject", "", "finding", "repair"], [list(asdict(each).values()) for each in findings]
        )
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def machine(here: Session) -> Iterator[Finding]:
    yield python()
    yield disk(here.folder.path)
    yield torch()


def local(here: Session) -> Iterator[Finding]:
    found = database(here)
    yield found
    if found.verdict is Verdict.OK:
        yield from certificates(here)
    yield port(here)
    yield processes(here)


def federation(here: Session, gateway: GatewayOptions) -> Iterator[Finding]:
    """The gateway, the key and the sites; what can't be asked without the one before is left out."""
    client = here.client(*gateway)
    health = attempt("gateway", lambda: f"{client.root} answers, version {client.get('/version')['version']}")
    yield health
    if health.verdict is Verdict.OK:
        yield attempt(
            "API key", lambda: f"accepted; {several(len(client.get('/v1/models')['data']), 'model')}"
        )
        yield from sites(here, gateway)


def python() -> Finding:
    return Finding("python", Verdict.OK, f"{sys.version.split()[0]} in {sys.prefix}")


def disk(folder: Path) -> Finding:
    """Where a local federation keeps its files, or would."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / 2**30:.0f} GiB free"
    if free < LOW_DISK_BYTES:
        return Finding("disk", Verdict.WARN, detail, "free some space: logs, journal and weights need it")
    return Finding("disk", Verdict.OK, detail)


def torch() -> Finding:
    if find_spec("torch") is None:
        return Finding(
            "torch", Verdict.WARN, "not installed: no site can run here", "pip install 'mico[engine]'"
        )
    try:
        import torch as installed

        device = installed.cuda.get_device_name(0) if installed.cuda.is_available() else "CPU only"
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        return Finding("torch", Verdict.FAIL, f"installed, but it does not work: {why}", "install it anew")
    return Finding("torch", Verdict.OK, f"{installed.__version__}, {device}")


def database(here: Session) -> Finding:
    """Read through the store itself, so that a wrong schema and a wrong address are told apart."""
    from gateway.store.errors import SchemaMismatch
    from gateway.store.store import Store
    from mico.store_access import with_store

    where = here.settings.resolve("database_url")
    if where.origin == "default" and not here.folder.path.exists():
        return Finding("database", Verdict.WARN, "none yet", "mico up")

    async def count(store: Store) -> int:
        return await store.read.count_usage()

    try:
        rows = with_store(where.value, here.folder.path, count)
    except CommandFailed as failure:
        unprepared = isinstance(failure.__cause__, SchemaMismatch)
        repair = "mico db upgrade" if unprepared else "start it, or correct its address: mico config show"
        return Finding("database", Verdict.FAIL, failure.cause, repair)
    return Finding("database", Verdict.OK, f"{where.shown}, newest schema, {several(rows, 'usage row')}")


def certificates(here: Session) -> Iterator[Finding]:
    """Nothing where sites have none. One that is past three quarters of its life should have been renewed."""
    from gateway.security.pki.authority import SITE_LIFE
    from gateway.store.certificates import RegisteredSite
    from gateway.store.store import Store
    from mico.store_access import with_store

    async def every(store: Store) -> list[RegisteredSite]:
        return await store.certificates.list_sites()

    listed = with_store(here.settings.value("database_url"), here.folder.path, every)
    held = {each.site: each.expires_at for each in listed if each.expires_at is not None}
    late = [site for site, until in held.items() if until - time.time() < SITE_LIFE.total_seconds() / 4]
    if late:
        yield Finding("certificates", Verdict.WARN, f"not renewed: {', '.join(late)}", "mico pki list")
    elif held:
        yield Finding("certificates", Verdict.OK, several(len(held), "site has one", "sites have one"))


def port(here: Session) -> Finding:
    number = here.settings.value("port")
    running = here.folder.running()
    if running and any(gateway.alive for gateway in running.gateways):
        return Finding("port", Verdict.OK, f"{running.http_ports[0]} is the gateway's")
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", number)) == 0
    if taken:
        return Finding("port", Verdict.WARN, f"{number} is in use by another program", "mico up --port 0")
    return Finding("port", Verdict.OK, f"{number} is free")


def processes(here: Session) -> Finding:
    running = here.folder.running()
    if running is None:
        return Finding("processes", Verdict.WARN, "nothing runs in this folder", "mico up")
    dead = [process.name for process in running.processes if not process.alive]
    if dead:
        return Finding("processes", Verdict.FAIL, f"ended: {', '.join(dead)}", "mico up --detach")
    return Finding("processes", Verdict.OK, f"{len(running.processes)} run")


def sites(here: Session, gateway: GatewayOptions) -> Iterator[Finding]:
    try:
        listed = here.client(*gateway).get("/admin/api/sites")["sites"]
    except CommandFailed as failure:
        yield Finding("sites", Verdict.WARN, failure.cause, "mico keys create NAME --admin")
        return
    yield joined({site["name"]: site["state"] for site in listed})
    yield from clocks({site["name"]: site["clock_ahead_s"] for site in listed})


def joined(states: Mapping[str, str]) -> Finding:
    not_ready = [f"{name} is {state}" for name, state in states.items() if state != "ready"]
    if not states:
        return Finding("sites", Verdict.FAIL, "no site has joined", "mico site --config FILE")
    if not_ready:
        return Finding("sites", Verdict.WARN, ", ".join(not_ready), "mico sites list")
    return Finding("sites", Verdict.OK, f"{len(states)} ready")


def clocks(ahead: Mapping[str, float | None]) -> Iterator[Finding]:
    """Against the gateway's. Nothing is decided by them; certificates, logs and traces are read by them."""
    told = {name: ahead_s for name, ahead_s in ahead.items() if ahead_s is not None}
    wrong = [
        f"{name} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
        for name, ahead_s in told.items()
        if abs(ahead_s) > CLOCKS_WITHIN_S
    ]
    if wrong:
        yield Finding("clocks", Verdict.WARN, ", ".join(wrong), "chronyc makestep  (on that machine)")
    elif told:
        worst = max(abs(ahead_s) for ahead_s in told.values())
        yield Finding(
            "clocks", Verdict.OK, f"{several(len(told), 'site')} within {1000 * worst:.0f} ms of the gateway"
        )


def attempt(subject: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, Verdict.OK, ask())
    except CommandFailed as failure:
        return Finding(subject, Verdict.FAIL, failure.error, failure.tip)
