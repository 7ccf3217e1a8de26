"""Processes by pid and start time: a pid that was given to somebody else meanwhile is never signalled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """`started` is the system's own start stamp; with the pid it names one process for all time."""

    name: str
    role: str
    pid: int
    started: str
    log: str

    @property
    def alive(self) -> bool:
        return start_stamp(self.pid) == self.started


def start(name: str, role: str, arguments: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
    """Run `mico ARGUMENTS` in a session of its own: Ctrl-C reaches us alone, and we end it in order."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "mico", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    return Process(name, role, child.pid, start_stamp(child.pid) or "", str(log))


def start_stamp(pid: int) -> str | None:
    """When that process began, in the system's words; None when it has ended (a zombie has ended too)."""
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
    """Collect a child of ours that ended; other people's processes are no business of ours."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def end(processes: Sequence[Process], within_s: float) -> list[Process]:
    """Ask all to end, wait, then kill what is left. Returns those that had to be killed."""
    send(processes, signal.SIGTERM)
    left = wait_for_end(processes, within_s)
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


def wait_for_end(processes: Sequence[Process], within_s: float) -> list[Process]:
    deadline_s = time.monotonic() + within_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = [process for process in left if process.alive]
    return left


def last_lines(log: str, count: int = 15) -> str:
    """The end of a log, for the person who has to find out why a process ended."""
    path = Path(log)
    if not path.exists():
        return ""
    return "\n".join(plain(line) for line in path.read_text(errors="replace").splitlines()[-count:])


def plain(line: str) -> str:
    """A structured line as `level: message` and the last line of its traceback; another as it is."""
    try:
        entry = json.loads(line)
        traceback = str(entry.get("exception") or entry.get("fault") or "")
        parts = (entry["level"], entry["message"], traceback.strip().rpartition("\n")[2])
    except (ValueError, KeyError, TypeError, AttributeError):
        return line
    return ": ".join(part for part in parts if part)
