"""Start, stop and watch one background process for Terraform's provisioners. Standard library only.

    process.py start SPEC | stop SPEC     SPEC is JSON, see main.tf
    process.py refresh FOLDER             count deaths below FOLDER; the next plan replaces just those

A process is identified by its pid and its start time: a reused pid is never signalled.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

POLL_S = 0.05
KILL_S = 5


def started_at(pid: int) -> int | None:
    """Return the kernel's start time of a live process; a zombie counts as gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def living(folder: Path) -> int | None:
    """Return the pid of the recorded process if it still runs."""
    try:
        record = json.loads((folder / "record.json").read_text())
    except FileNotFoundError:
        return None
    return int(record["pid"]) if started_at(record["pid"]) == record["started_at"] else None


def answers(ready: dict[str, str]) -> bool:
    """Return whether the URL answers 2xx with the awaited text."""
    try:
        with urllib.request.urlopen(ready["url"], timeout=1) as answer:
            return ready["contains"] in answer.read().decode()
    except OSError:
        return False


def start(spec: dict[str, Any]) -> None:
    """Start the process in a session of its own, return when it is ready.

    Leave nothing behind on failure, nor where Ctrl-C in Terraform ends the wait.
    """
    folder = Path(spec["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    stop(spec)  # an apply that broke off may have left one
    if not spec["ready"]["contains"] and answers(spec["ready"]):
        fail(spec, f"something else answers at {spec['ready']['url']} already")
    with (folder / "log").open("ab") as log:  # a pipe that it inherited would keep Terraform waiting
        process = subprocess.Popen(
            spec["command"],
            cwd=folder,
            env={**os.environ, **spec["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record = {"pid": process.pid, "started_at": started_at(process.pid)}
    try:
        (folder / "record.json").write_text(json.dumps(record))
        await_ready(spec, process)
    except BaseException as ended:
        stop(spec)
        if isinstance(ended, KeyboardInterrupt):
            sys.exit(f"{folder.name}: interrupted before it was ready")
        raise


def await_ready(spec: dict[str, Any], process: subprocess.Popen[bytes]) -> None:
    """Return when the process is ready; exit with the reason where it does not become so in time."""
    deadline = time.monotonic() + spec["start_s"]
    while time.monotonic() < deadline:
        if process.poll() is not None:
            fail(spec, f"exited with {process.returncode} before it was ready")
        if answers(spec["ready"]):
            return
        time.sleep(POLL_S)
    fail(spec, f"not ready at {spec['ready']['url']} after {spec['start_s']} s")


def fail(spec: dict[str, Any], reason: str) -> None:
    """Clean up, since Terraform does not destroy what it could not create, and exit with the reason."""
    stop(spec)
    sys.exit(f"{Path(spec['folder']).name}: {reason}; see {spec['folder']}/log")


def stop(spec: dict[str, Any]) -> None:
    """End the process and all it started: SIGTERM, time to drain, SIGKILL."""
    folder = Path(spec["folder"])
    for signum, wait_s in ((signal.SIGTERM, spec["stop_s"]), (signal.SIGKILL, KILL_S)):
        pid = living(folder)
        if pid is None:
            break
        with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
            os.killpg(pid, signum)
        deadline = time.monotonic() + wait_s
        while living(folder) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    (folder / "record.json").unlink(missing_ok=True)


def refresh(root: Path) -> None:
    """Count every death that was not requested."""
    for record in sorted(root.glob("*/record.json")):
        if living(record.parent):
            continue
        deaths = record.with_name("deaths")
        deaths.write_text(str(int(deaths.read_text() if deaths.exists() else 0) + 1))
        record.unlink()
        sys.stdout.write(f"{record.parent.name} died\n")


if __name__ == "__main__":
    if sys.argv[1] == "refresh":
        refresh(Path(sys.argv[2]))
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        {"start": start, "stop": stop}[sys.argv[1]](json.loads(sys.argv[2]))
