"""The context of a command: the terminal, the settings, and the folder of the local federation."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from mico.local.folder import Folder
from mico.settings import FILE, Settings, read_file
from mico.terminal import Terminal

if TYPE_CHECKING:
    from gateway.store.store import Store
    from mico.client import Client

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """The context of a command. `exit_stack` is closed when the command ends or fails."""

    terminal: Terminal
    settings: Settings
    folder: Folder
    exit_stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, folder: Path, *, quiet: bool) -> Session:
        """Read mico.toml and the state of the folder once, so that a command's settings are consistent."""
        local = Folder(folder.resolve())
        settings = Settings(os.environ, read_file(Path(FILE)), local.client_settings())
        return cls(Terminal(quiet), settings, local)

    def client(self, base_url: str | None, api_key: str | None) -> Client:
        """Return a client of the gateway given by options and settings. It is closed with the session."""
        from mico.client import Client

        url = self.settings.value("base_url", base_url)
        client = Client(url, self.settings.value("api_key", api_key))
        self.exit_stack.callback(client.http.close)
        return client

    def with_store(self, database_url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run `work` on the store of the gateways' database, and return its result. Raises CommandFailed."""
        from mico.store_access import with_store

        return with_store(self.settings.value("database_url", database_url), self.folder.path, work)


def session_of(context: typer.Context) -> Session:
    """Return the session created by the callback of the command line."""
    found = context.find_object(Session)
    assert found is not None, "the callback of the command line makes it"
    return found
