"""The life of a local federation: start, wait until every site is ready, watch, restart what died, end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from mico.client import Client
from mico.errors import CommandFailed
from mico.local.folder import Folder, Running
from mico.local.plan import Plan
from mico.local.processes import Process, end, last_lines, start

READY_WITHIN_S = 240.0
POLL_S = 0.2
GATEWAY_DRAIN_S = 30.0
SITE_END_S = 10.0

STARTED = ("ready", "draining", "paused")
"""An operator's order outlives the processes: a site that was told to drain is up, and drains."""

States = Mapping[str, str]
"""The state of each process by name: `starting`, `ready`, `ended`, or what the gateway says of a site."""


def start_all(plan: Plan) -> Running:
    """One gateway and its sites. What started is noted at once, so that `mico down` always finds it."""
    plan.write()
    gateway = start_process(plan.folder, "gateway", "gateway")
    running = Running(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        http_port=plan.http_port,
        grpc_port=plan.grpc_port,
        model=plan.model,
        processes=(gateway,),
    )
    plan.folder.remember(running)
    for site in plan.sites:
        process = start_process(plan.folder, site.name, "site")
        running = replace(running, processes=(*running.processes, process))
        plan.folder.remember(running)
    return running


def start_process(folder: Folder, name: str, role: str) -> Process:
    """One core's worth of threads each: BLAS would otherwise take every core for every site."""
    arguments = [role, "--config", str(folder.config(name))]
    return start(name, role, arguments, folder.log(name), {"OMP_NUM_THREADS": "1"})


def restart_dead(folder: Folder, running: Running) -> Running:
    """The same federation with every dead site started again from its settings."""
    processes = tuple(
        each if each.alive else start_process(folder, each.name, each.role) for each in running.processes
    )
    running = replace(running, processes=processes)
    folder.remember(running)
    return running


def states(running: Running, key: str | None) -> dict[str, str]:
    """What each process is doing now. A process that ended stays in the list as `ended`."""
    alive = {process.name: process.alive for process in running.processes}
    listed: dict[str, str] = {}
    if alive[running.gateway.name]:
        try:
            sites = Client(running.base_url, key).get("/admin/api/sites")["sites"]
            listed = {running.gateway.name: "ready", **{site["name"]: site["state"] for site in sites}}
        except CommandFailed:
            listed = {}
    return {name: listed.get(name, "starting") if live else "ended" for name, live in alive.items()}


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
    """The gateway first: it finishes what it answers. Then the sites. Returns what had to be killed."""
    killed = end([running.gateway], GATEWAY_DRAIN_S)
    killed += end(running.sites, SITE_END_S)
    folder.forget()
    return killed


def kill_all(folder: Folder, running: Running) -> list[Process]:
    """At once, without draining."""
    killed = end(running.processes, 0.0)
    folder.forget()
    return killed
