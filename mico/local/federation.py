"""Lifecycle of a local federation: start, wait until ready, watch, restart dead processes, stop."""

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

READY_TIMEOUT_S = 240.0
POLL_S = 0.2
STATE_TIMEOUT_S = 5.0
"""A gateway that is silent this long counts as one that does not answer."""
GATEWAY_STOP_TIMEOUT_S = 30.0
SITE_STOP_TIMEOUT_S = 10.0

STARTED_STATES = ("ready", "draining", "paused")
"""States of a site that has started: an operator's order to drain or pause outlives the processes."""

States = Mapping[str, str]
"""The state of each process by name: `starting`, `ready`, `ended`, or a site's state at the gateway."""


def start_all(plan: Plan) -> Running:
    """Start gateways and sites. Each process is recorded at once, so that `mico down` always finds it."""
    plan.write()
    running = Running(
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
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
            plan.folder.save_state(running)
    return running


def start_process(folder: Folder, name: str, role: str) -> Process:
    """Start one process with one thread for BLAS, which would otherwise take every core for every site."""
    arguments = [role, "--config", str(folder.config(name))]
    return start(name, role, arguments, folder.log(name), {"OMP_NUM_THREADS": "1"})


def restart_dead(folder: Folder, running: Running) -> Running:
    """Start every dead process again from its settings; return the federation as it then runs."""
    for place, each in enumerate(running.processes):
        if not each.alive:
            with uninterrupted():
                fresh = start_process(folder, each.name, each.role)
                processes = (*running.processes[:place], fresh, *running.processes[place + 1 :])
                running = replace(running, processes=processes)
                folder.save_state(running)
    return running


def states(running: Running, key: str | None) -> dict[str, str]:
    """Return the state of each process. A process that ended stays in the result as `ended`.

    A site is `ready` when every living gateway reports it so.
    """
    seen: dict[str, str] = {}
    for gateway, root_url in zip(running.gateways, running.root_urls, strict=True):
        if gateway.alive:
            for name, state in states_from(gateway, f"{root_url}/v1", key, running).items():
                if seen.get(name, "ready") == "ready":
                    seen[name] = state
    return {
        each.name: seen.get(each.name, "starting") if each.alive else "ended" for each in running.processes
    }


def states_from(gateway: Process, base_url: str, key: str | None, running: Running) -> dict[str, str]:
    """Return the states of one gateway and of all sites as it reports them."""
    unseen = {site.name: "starting" for site in running.sites}
    client = Client(base_url, key)
    try:
        sites = client.get("/admin/api/sites", timeout_s=STATE_TIMEOUT_S)["sites"]
    except CommandFailed:
        return {gateway.name: "starting", **unseen}
    finally:
        client.http.close()
    return {gateway.name: "ready", **unseen, **{site["name"]: site["state"] for site in sites}}


def wait_until_ready(running: Running, key: str | None, show_states: Callable[[States], None]) -> None:
    """Wait until every process is ready, calling `show_states` with each poll.

    Raises CommandFailed with the end of the log of a process that ended, or after READY_TIMEOUT_S.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        current = states(running, key)
        show_states(current)
        for process in running.processes:
            if current[process.name] == "ended":
                raise CommandFailed(
                    f"{process.name} ended while starting",
                    cause=last_lines(process.log) or "its log is empty",
                    tip=f"the whole log: {process.log}",
                )
        if all(state in STARTED_STATES for state in current.values()):
            return
        time.sleep(POLL_S)
    late = [name for name, state in states(running, key).items() if state not in STARTED_STATES]
    raise CommandFailed(
        f"not ready within {READY_TIMEOUT_S:.0f} s: {', '.join(late)}",
        tip=f"the logs say why: {', '.join(p.log for p in running.processes if p.name in late)}",
    )


def stop_all(folder: Folder, running: Running) -> list[Process]:
    """Stop the gateways, which finish their answers, then the sites; return the ones killed."""
    killed = end(running.gateways, GATEWAY_STOP_TIMEOUT_S)
    killed += end(running.sites, SITE_STOP_TIMEOUT_S)
    folder.delete_state()
    return killed


def kill_all(folder: Folder, running: Running) -> list[Process]:
    """Kill every process without draining, not interruptible; return them."""
    with uninterrupted():
        killed = end(running.processes, 0.0)
        folder.delete_state()
    return killed
