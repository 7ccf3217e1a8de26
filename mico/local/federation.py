"""The life of a local federation: start, wait until every site is ready, watch, restart what died, end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from mico.client import Client
from mico.errors import CommandFailed
from mico.local.folder import Folder, Running
from mico.local.interrupts import uninterrupted
from mico.local.plan import Plan
from mico.local.processes import Process, end, last_lines, start

READY_WITHIN_S = 240.0
POLL_S = 0.2
TOLD_WITHIN_S = 5.0
"""A gateway that says nothing for so long is as one that does not answer."""
GATEWAY_DRAIN_S = 30.0
SITE_END_S = 10.0

STARTED = ("ready", "draining", "paused")
"""An operator's order outlives the processes: a site that was told to drain is up, and drains."""

States = Mapping[str, str]
"""The state of each process by name: `starting`, `ready`, `ended`, or what the gateway says of a site."""


def start_all(plan: Plan) -> Running:
    """Gateways and sites. What started is noted at once, so that `mico down` always finds it."""
    plan.write()
    running = Running(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        http_ports=tuple(ports.http for ports in plan.gateways),
        model=plan.model,
        database_url=plan.database_url,
        processes=(),
    )
    roles = [(name, "gateway") for name in plan.gateway_names] + [(site.name, "site") for site in plan.sites]
    for name, role in roles:
        with uninterrupted():
            process = start_process(plan.folder, name, role)
            running = replace(running, processes=(*running.processes, process))
            plan.folder.remember(running)
    return running


def start_process(folder: Folder, name: str, role: str) -> Process:
    """One core's worth of threads each: BLAS would otherwise take every core for every site."""
    arguments = [role, "--config", str(folder.config(name))]
    return start(name, role, arguments, folder.log(name), {"OMP_NUM_THREADS": "1"})


def restart_dead(folder: Folder, running: Running) -> Running:
    """The same federation with every dead process started again from its settings."""
    for place, each in enumerate(running.processes):
        if not each.alive:
            with uninterrupted():
                fresh = start_process(folder, each.name, each.role)
                processes = (*running.processes[:place], fresh, *running.processes[place + 1 :])
                running = replace(running, processes=processes)
                folder.remember(running)
    return running


def states(running: Running, key: str | None) -> dict[str, str]:
    """What each process is doing now. A process that ended stays in the list as `ended`.

    A site is `ready` when every living gateway says so.
    """
    listed: dict[str, str] = {}
    for gateway, root_url in zip(running.gateways, running.root_urls, strict=True):
        if gateway.alive:
            for name, state in told_by(gateway, f"{root_url}/v1", key, running).items():
                if listed.get(name, "ready") == "ready":
                    listed[name] = state
    return {
        each.name: listed.get(each.name, "starting") if each.alive else "ended" for each in running.processes
    }


def told_by(gateway: Process, base_url: str, key: str | None, running: Running) -> dict[str, str]:
    """The states of that gateway and of all sites, as it sees them."""
    unseen = {site.name: "starting" for site in running.sites}
    client = Client(base_url, key)
    try:
        sites = client.get("/admin/api/sites", within_s=TOLD_WITHIN_S)["sites"]
    except CommandFailed:
        return {gateway.name: "starting", **unseen}
    finally:
        client.http.close()
    return {gateway.name: "ready", **unseen, **{site["name"]: site["state"] for site in sites}}


def wait_until_ready(running: Running, key: str | None, tell: Callable[[States], None]) -> None:
    """Returns when all are ready. Raises CommandFailed with the end of the log of one that ended."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        now = states(running, key)
        tell(now)
        for process in running.processes:
            if now[process.name] == "ended":
                raise CommandFailed(
                    f"{process.name} ended while starting",
                    cause=last_lines(process.log) or "its log is empty",
                    tip=f"the whole log: {process.log}",
                )
        if all(state in STARTED for state in now.values()):
            return
        time.sleep(POLL_S)
    late = [name for name, state in states(running, key).items() if state not in STARTED]
    raise CommandFailed(
        f"not ready within {READY_WITHIN_S:.0f} s: {', '.join(late)}",
        tip=f"the logs say why: {', '.join(p.log for p in running.processes if p.name in late)}",
    )


def stop_all(folder: Folder, running: Running) -> list[Process]:
    """The gateways first: they finish what they answer. Then the sites. Returns what had to be killed."""
    killed = end(running.gateways, GATEWAY_DRAIN_S)
    killed += end(running.sites, SITE_END_S)
    folder.forget()
    return killed


def kill_all(folder: Folder, running: Running) -> list[Process]:
    """At once, without draining; nothing keeps it from killing all of them."""
    with uninterrupted():
        killed = end(running.processes, 0.0)
        folder.forget()
    return killed
