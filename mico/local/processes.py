"""Child processes, identified by pid and start time: a reused pid is never signalled. Each bounds its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_READ_BYTES = 64 * 1024
"""Of the end of a log."""
MAX_LOG_BYTES = 32 * 2**20
"""Of a log, and of the one before it: a gateway writes half a KB a query."""
LOG_CHECK_S = 1.0
LOG_VARIABLE = "MICO_UP_LOG"
"""Passes the path of its log to a process of `mico up`: the log of another process is not ours to bound."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process. `started` is the system's start stamp, which with the pid identifies it for all time."""

    name: str
    role: str
    pid: int
    started: str
    log: str

    @property
    def alive(self) -> bool:
        return start_stamp(self.pid) == self.started


def start(name: str, role: str, arguments: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
    """Run `mico ARGUMENTS` in a session of its own: Ctrl-C does not reach it, we end it in order.

    Its log starts empty; that of the process before it is kept as `LOG.1`.
    """
    with suppress(FileNotFoundError):
        log.replace(previous_log(log))
    with log.open("ab") as output:  # appends, so that what is written after a truncation is at the start
        child = subprocess.Popen(
            [sys.executable, "-m", "mico", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment, LOG_VARIABLE: str(log)},
        )
    return Process(name, role, child.pid, start_stamp(child.pid) or "", str(log))


def start_stamp(pid: int) -> str | None:
    """Return the start time of a process as the system writes it, or None if it has ended (also a zombie)."""
    reap(pid)
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip() or None


def reap(pid: int) -> None:
    """Collect the exit status of a child that ended; ignore processes that are not children."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def end(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    """Terminate all processes, wait, then kill the rest. Return the processes that were killed."""
    send(processes, signal.SIGTERM)
    left = wait_for_end(processes, timeout_s)
    send(left, signal.SIGKILL)
    wait_for_end(left, 5.0)
    return left


def send(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.alive:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def wait_for_end(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    deadline_s = time.monotonic() + timeout_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = [process for process in left if process.alive]
    return left


def bound_log() -> None:
    """Bound the log of this process from a thread, if `mico up` started it."""
    log = os.environ.pop(LOG_VARIABLE, "")
    if log:
        threading.Thread(target=_watch_log, args=(Path(log),), name="log", daemon=True).start()


def _watch_log(log: Path) -> None:
    while True:
        with suppress(OSError):  # no room for the copy, or the folder was removed
            if log.stat().st_size > MAX_LOG_BYTES:
                roll_log(log)
        time.sleep(LOG_CHECK_S)


def roll_log(log: Path) -> None:
    """Move the lines of a log to `LOG.1`, and keep the file, which its writers have open.

    What is written between the end of the copy and the truncation is lost: some lines of tens of thousands.
    Without room for the copy, which ends it in an OSError, what did not fit is lost, too.
    """
    try:
        shutil.copyfile(log, previous_log(log))
    finally:
        os.truncate(log, 0)


def previous_log(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def last_lines(log: str, count: int = 15) -> str:
    """Return the end of a log, which usually says why a process ended."""
    path = Path(log)
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(-min(MAX_READ_BYTES, path.stat().st_size), os.SEEK_END)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(summarize_line(line) for line in lines[-count:])


def summarize_line(line: str) -> str:
    """Return a structured line as `level: message` and the end of its traceback, others unchanged."""
    try:
        entry = json.loads(line)
        traceback = str(entry.get("exception") or entry.get("fault") or "")
        parts = (entry["level"], entry["message"], traceback.strip().rpartition("\n")[2])
    except (ValueError, KeyError, TypeError, AttributeError):
        return line
    return ": ".join(part for part in parts if part)
