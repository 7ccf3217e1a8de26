"""The command line in this process, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mico.cli import command_tree, main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def every_command(command: Any = None, name: str = "mico") -> Iterator[tuple[str, set[str]]]:
    """The full name of each command, with its options."""
    command = command or command_tree()
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, {option for parameter in command.params for option in parameter.opts}
        return
    for word, each in inner.items():
        yield from every_command(each, f"{name} {word}")


def leave_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in an empty folder, without variables that name another gateway or database."""
    for name in (
        "MICO_BASE_URL",
        "MICO_API_KEY",
        "MICO_DATABASE_URL",
        "MICO_FOLDER",
        "MICO_GATEWAY_KEY_PEPPER",
        "OPENAI_BASE_URL",
        "MICO_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
