"""Start the engine's process. Imports little, so that a site can do so before all else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

COMMAND = (sys.executable, "-m", "site_engine.engine_process")
"""Starts the engine's process; the number of its socket follows."""


class Spawned(NamedTuple):
    """A process that waits for its first message, and our end of its socket: it ends when that closes."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


Spawn: TypeAlias = Callable[[], Spawned]


def spawn(command: Sequence[str] = COMMAND) -> Spawned:
    """Start a process that finds the packages where this one does."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (*command, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return Spawned(process, ours)


def prestarted(spawn: Spawn = spawn) -> Spawn:
    """Start a process now; return a function that hands it out at its first call, and starts others later."""
    first = [spawn()]
    return lambda: first.pop() if first else spawn()
