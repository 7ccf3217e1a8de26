"""`mico doctor`: checks of this machine and of the federation, each with the command that repairs it."""

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

from gateway.wording import first_few, several
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import Session, session_of

LOW_DISK_BYTES = 2 * 2**30
MAX_CLOCK_SKEW_S = 1.0


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `repair` is the command that repairs it, or empty."""

    subject: str
    verdict: Verdict
    detail: str
    repair: str = ""


@with_option_groups
def doctor(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Check this machine and the federation: each line is ok, warn or fail, with the repair."""
    session = session_of(context)
    findings = [*check_machine(session), *check_local(session), *check_federation(session, gateway)]
    if as_json:
        session.terminal.json([asdict(finding) for finding in findings])
    else:
        session.terminal.table(
            ["subject", "", "finding", "repair"], [list(asdict(each).values()) for each in findings]
        )
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def check_machine(session: Session) -> Iterator[Finding]:
    yield check_python()
    yield check_disk(session.folder.path)
    yield check_torch()
    yield check_models()


def check_local(session: Session) -> Iterator[Finding]:
    finding = check_database(session)
    yield finding
    if finding.verdict is Verdict.OK:
        yield from check_certificates(session)
    yield check_port(session)
    yield check_processes(session)


def check_federation(session: Session, gateway: GatewayOptions) -> Iterator[Finding]:
    """Check the gateway, the key and the sites; stop at the first that fails, since the next need it."""
    client = session.client(*gateway)
    health = check_request(
        "gateway", lambda: f"{client.root} answers, version {client.get('/version')['version']}"
    )
    yield health
    if health.verdict is Verdict.OK:
        yield check_request(
            "API key", lambda: f"accepted; {several(len(client.get('/v1/models').objects('data')), 'model')}"
        )
        yield from check_sites(session, gateway)


def check_python() -> Finding:
    return Finding("python", Verdict.OK, f"{sys.version.split()[0]} in {sys.prefix}")


def check_disk(folder: Path) -> Finding:
    """Check the free space where a local federation keeps its files, or would."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.0f} GiB free"
    if free < LOW_DISK_BYTES:
        return Finding("disk", Verdict.WARN, detail, "free some space: logs, journal and weights need it")
    return Finding("disk", Verdict.OK, detail)


def check_torch() -> Finding:
    if find_spec("torch") is None:
        return Finding(
            "torch",
            Verdict.WARN,
            "not installed: sites here can only be in front of servers",
            "install the extra engine (in a checkout: ./dev setup)",
        )
    try:
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU only"
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        return Finding("torch", Verdict.FAIL, f"installed, but it does not work: {why}", "install it anew")
    return Finding("torch", Verdict.OK, f"{torch.__version__}, {device}")


def check_models() -> Finding:
    from mico.known_models import KNOWN, local_models

    missing = [name for name in ("accelerate", "gguf") if find_spec("torch") and find_spec(name) is None]
    if missing:
        detail = f"no GGUF file can be converted without {' and '.join(missing)}"
        return Finding("models", Verdict.WARN, detail, "pip install 'mico[engine]'")
    here = [model for model in local_models() if model.state != "to fetch"]
    if not here:
        return Finding("models", Verdict.OK, f"none fetched; mico models fetch {next(iter(KNOWN))}")
    size = f"{sum(model.bytes for model in here) / 1e6:,.0f} MB"
    return Finding("models", Verdict.OK, f"{', '.join(model.name for model in here)}; {size}")


def check_database(session: Session) -> Finding:
    """Read through the store itself, so that a wrong schema and a wrong address get different repairs."""
    from gateway.store.errors import SchemaMismatch, SchemaTooNew
    from gateway.store.store import Store
    from mico.store_access import with_store

    where = session.settings.resolve("database_url")
    if where.origin == ".mico" and not session.folder.path.exists():
        return Finding("database", Verdict.WARN, "none yet", "mico up")

    async def count(store: Store) -> int:
        return await store.read.count_usage()

    try:
        rows = with_store(where.value, session.folder.path, count)
    except CommandFailed as failure:
        match failure.__cause__:
            case SchemaTooNew():
                repair = "use the newer version, or another database: mico config show"
            case SchemaMismatch():
                repair = "mico db upgrade"
            case _:
                repair = "start it, or correct its address: mico config show"
        return Finding("database", Verdict.FAIL, failure.cause, repair)
    return Finding("database", Verdict.OK, f"{where.shown}, usable schema, {several(rows, 'usage row')}")


def check_certificates(session: Session) -> Iterator[Finding]:
    """Check the sites' certificates, if there are any: each is renewed before three quarters of its life."""
    from gateway.security.pki.authority import SITE_LIFE
    from gateway.store.certificates import RegisteredSite
    from gateway.store.store import Store
    from mico.store_access import with_store

    async def every(store: Store) -> list[RegisteredSite]:
        return await store.certificates.list_sites()

    listed = with_store(session.settings.value("database_url"), session.folder.path, every)
    expiry_by_site = {each.site: each.expires_at for each in listed if each.expires_at is not None}
    late = [
        site for site, until in expiry_by_site.items() if until - time.time() < SITE_LIFE.total_seconds() / 4
    ]
    if late:
        yield Finding("certificates", Verdict.WARN, f"not renewed: {first_few(late)}", "mico pki list")
    elif expiry_by_site:
        yield Finding(
            "certificates", Verdict.OK, several(len(expiry_by_site), "site has one", "sites have one")
        )


def check_port(session: Session) -> Finding:
    number = session.settings.value("port")
    running = session.folder.running()
    if running and any(gateway.alive for gateway in running.gateways):
        return Finding("port", Verdict.OK, f"{running.http_ports[0]} is the gateway's")
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", number)) == 0
    if taken:
        return Finding("port", Verdict.WARN, f"{number} is in use, not by mico up here", "mico up --port 0")
    return Finding("port", Verdict.OK, f"{number} is free")


def check_processes(session: Session) -> Finding:
    running = session.folder.running()
    if running is None:
        return Finding("processes", Verdict.WARN, "nothing runs in this folder", "mico up")
    dead = [process.name for process in running.processes if not process.alive]
    if dead:
        return Finding("processes", Verdict.FAIL, f"ended: {', '.join(dead)}", "mico up --detach")
    return Finding("processes", Verdict.OK, f"{len(running.processes)} run")


def check_sites(session: Session, gateway: GatewayOptions) -> Iterator[Finding]:
    try:
        listed = session.client(*gateway).get("/admin/api/sites").objects("sites")
    except CommandFailed as failure:
        yield Finding("sites", Verdict.WARN, failure.cause, "mico keys create NAME --admin")
        return
    yield check_joined({site["name"]: site["state"] for site in listed})
    yield from check_clocks({site["name"]: site["clock_ahead_s"] for site in listed})


def check_joined(states: Mapping[str, str]) -> Finding:
    not_ready = [f"{name} is {state}" for name, state in states.items() if state != "ready"]
    if not states:
        return Finding("sites", Verdict.FAIL, "no site has joined", "mico site --config FILE")
    if not_ready:
        return Finding("sites", Verdict.WARN, ", ".join(not_ready), "mico sites list")
    return Finding("sites", Verdict.OK, f"{len(states)} ready")


def check_clocks(ahead: Mapping[str, float | None]) -> Iterator[Finding]:
    """Compare the sites' clocks with the gateway's.

    No decision depends on them, but certificates, logs and traces do.
    """
    known = {name: ahead_s for name, ahead_s in ahead.items() if ahead_s is not None}
    wrong = [
        f"{name} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
        for name, ahead_s in known.items()
        if abs(ahead_s) > MAX_CLOCK_SKEW_S
    ]
    if wrong:
        yield Finding("clocks", Verdict.WARN, ", ".join(wrong), "chronyc makestep  (on that machine)")
    elif known:
        worst = max(abs(ahead_s) for ahead_s in known.values())
        yield Finding(
            "clocks", Verdict.OK, f"{several(len(known), 'site')} within {1000 * worst:.0f} ms of the gateway"
        )


def check_request(subject: str, request: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, Verdict.OK, request())
    except CommandFailed as failure:
        return Finding(subject, Verdict.FAIL, failure.error, failure.tip)
