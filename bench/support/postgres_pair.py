"""Two Postgres servers on this machine: a primary and its synchronous standby, which can be promoted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psycopg

from mico.local.plan import free_port
from tests.support.postgres_server import find_binaries

HOST = "127.0.0.1"
USER, DATABASE = "mico", "mico"
OPTIONS = (
    "-c", "wal_level=replica", "-c", "max_wal_senders=4", "-c", "wal_keep_size=64MB", "-c", "hot_standby=on",
    "-c", "log_checkpoints=off", "-F",
)  # fmt: skip


class PostgresPair:
    """Commits wait for the standby, so that what was acknowledged is there after the primary's death.

    With an asynchronous standby a failover loses the commits of its lag, whatever the client does.
    """

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="mico-pair-"))
        self._user = "nobody" if os.geteuid() == 0 else None  # Postgres refuses to run as root
        self._ports = (free_port(), free_port())
        if self._user is not None:
            shutil.chown(self._folder, self._user)

    @property
    def url(self) -> str:
        """The connection string with both hosts, of which the one that accepts writes is used."""
        hosts = "&".join(f"host={HOST}:{port}" for port in self._ports)
        return f"postgresql://{USER}@/{DATABASE}?{hosts}&target_session_attrs=read-write"

    def start(self) -> None:
        """Make the primary, copy it as the standby, start both; return when commits wait for the standby."""
        self._run("initdb", "-D", self._data(0), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync", "-N")
        self._control(0, "start")
        self._execute(0, f"CREATE DATABASE {DATABASE}")
        self._control(0, "stop")
        standby = self._data(1)
        shutil.copytree(self._data(0), standby)
        (standby / "standby.signal").touch()
        with (standby / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = 'host={HOST} port={self._ports[0]} user={USER}'\n")
        self._give_away(standby)
        self._control(0, "start")
        self._control(1, "start")
        self._execute(0, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._execute(0, "SELECT pg_reload_conf()")

    def kill_primary(self) -> None:
        """Kill every process of the primary with SIGKILL."""
        server = self._pid(0)
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for pid in (server, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def promote(self) -> None:
        """Make the standby the primary; return when it accepts writes."""
        self._control(1, "promote")

    def stop(self) -> None:
        for number in (0, 1):
            with suppress(subprocess.CalledProcessError):  # a killed server
                self._control(number, "stop")
        shutil.rmtree(self._folder)

    def _data(self, number: int) -> Path:
        return self._folder / f"data-{number}"

    def _pid(self, number: int) -> int:
        return int((self._data(number) / "postmaster.pid").read_text().split()[0])

    def _control(self, number: int, action: str) -> None:
        arguments: list[str | Path] = ["-D", self._data(number), "-w", "-t", "60"]
        if action == "start":
            given = ("-p", str(self._ports[number]), "-k", str(self._folder), "-h", HOST, *OPTIONS)
            arguments += ["-l", self._folder / f"log-{number}", "-o", " ".join(given)]
        elif action == "stop":
            arguments += ["-m", "immediate" if number else "fast"]
        self._run("pg_ctl", action, *arguments)

    def _execute(self, number: int, statement: str) -> None:
        address = f"postgresql://{USER}@{HOST}:{self._ports[number]}/postgres"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _give_away(self, folder: Path) -> None:
        if self._user is not None:
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, self._user)

    def _run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [self._binaries / program, *arguments],
            user=self._user,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )


def start_pair() -> PostgresPair | None:
    """Start a pair; None if this machine has no Postgres."""
    binaries = find_binaries()
    if binaries is None or not (binaries / "pg_ctl").exists():
        return None
    pair = PostgresPair(binaries)
    pair.start()
    return pair
