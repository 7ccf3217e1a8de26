"""The folder `.mico/`: database, keys, settings, logs and state.json. Only its owner can read it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mico.errors import CommandFailed
from mico.local.processes import Process
from mico.output_paths import create_folder


@dataclass(frozen=True, slots=True)
class Running:
    """The processes that `mico up` started, as kept in state.json."""

    started_at: str
    http_ports: tuple[int, ...]  # of the gateways, in their order
    model: str
    database_url: str
    processes: tuple[Process, ...]

    @property
    def root_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.http_ports)

    @property
    def root_url(self) -> str:
        return self.root_urls[0]

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"

    @property
    def gateways(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role == "gateway")

    @property
    def sites(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role == "site")


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.path / 'mico.db'}"

    @property
    def key_file(self) -> Path:
        return self.path / "key"

    @property
    def pepper_file(self) -> Path:
        return self.path / "key-pepper"

    @property
    def token_file(self) -> Path:
        return self.path / "site-token"

    def config(self, name: str) -> Path:
        return self.path / "config" / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def make(self) -> None:
        for folder in (self.path, self.path / "config", self.path / "logs"):
            create_folder(folder)
            folder.chmod(0o700)
        if not self.token_file.exists():
            write_private(self.token_file, secrets.token_urlsafe(32))

    def key(self) -> str | None:
        return self.key_file.read_text("utf-8", "replace").strip() if self.key_file.exists() else None

    def running(self) -> Running | None:
        """Return the state of the last `mico up`, whether or not its processes live. Raises CommandFailed."""
        state = self.path / "state.json"
        if not state.exists():
            return None
        try:
            note = json.loads(state.read_text("utf-8"))
            processes = tuple(Process(**each) for each in note["processes"])
            return Running(**{**note, "http_ports": tuple(note["http_ports"]), "processes": processes})
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(
                f"{state} is damaged, or another version wrote it",
                cause=f"{type(error).__name__}: {error}",
                tip="end what it started (ps shows it as python -m mico), then remove the file",
            ) from error

    def save_state(self, running: Running) -> None:
        write_private(self.path / "state.json", json.dumps(asdict(running), indent=2))

    def delete_state(self) -> None:
        (self.path / "state.json").unlink(missing_ok=True)

    def client_settings(self) -> dict[str, Any]:
        """Return the settings that a federation in this folder provides to client commands."""
        running, key = self.running(), self.key()
        settings: dict[str, Any] = {"database_url": self.database_url}
        if running:
            settings |= {"base_url": running.base_url, "database_url": running.database_url}
            settings |= {"api_key": key} if key else {}
        return settings

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Hold the folder's lock: one `mico up` or `mico down` at a time.

        Raises CommandFailed where another holds it, unless that is waited for.
        """
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise CommandFailed(
                    f"another mico up or down is at work in {self.path}", tip="wait for it, then try again"
                ) from error
            yield


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from the first byte on, and replace it atomically."""
    fresh = path.with_suffix(f"{path.suffix}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(
        os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)
    fresh.replace(path)
