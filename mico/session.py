"""What every command is given: the terminal, the settings, and the folder of the local federation."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mico.local.folder import Folder
from mico.settings import FILE, Settings, read_file
from mico.terminal import Terminal

if TYPE_CHECKING:
    from mico.client import Client


@dataclass(frozen=True, slots=True)
class Session:
    """`opened` is closed when the command ends, however it ends."""

    terminal: Terminal
    settings: Settings
    folder: Folder
    opened: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def here(cls, folder: Path, *, quiet: bool) -> Session:
        """Reads mico.toml and the folder's notes once; a command sees one consistent set of settings."""
        where = Folder(folder.resolve())
        return cls(Terminal(quiet), Settings(os.environ, read_file(Path(FILE)), where.found()), where)

    def client(self, base_url: str | None, api_key: str | None) -> Client:
        from mico.client import Client

        url = self.settings.value("base_url", base_url)
        client = Client(url, self.settings.value("api_key", api_key))
        self.opened.callback(client.http.close)
        return client


def session(context: typer.Context) -> Session:
    found = context.find_object(Session)
    assert found is not None, "the callback of the command line makes it"
    return found
