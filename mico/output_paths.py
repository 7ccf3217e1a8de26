"""Check the paths of results before a command computes them."""

from __future__ import annotations

import os
from pathlib import Path

from mico.errors import CommandFailed, ExitCode


def create_folder(folder: Path) -> None:
    """Create a folder if it does not exist. Raises CommandFailed if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder, "permission denied")


def check_new_folder(folder: Path) -> None:
    """Check that a folder can be created later. Creates its parent. Raises CommandFailed."""
    create_folder(folder if folder.exists() else folder.parent)


def check_output_file(file: Path, *, source: Path | None = None) -> None:
    """Check that a file can be written, and create its folder.

    Raises CommandFailed if it cannot, or if it is `source`, the input file of the command.
    """
    create_folder(file.parent)
    if file.is_dir():
        raise _not_writable(file, "it is a folder, not a file")
    if source is not None and file.exists() and file.samefile(source):
        raise _not_writable(file, "it is what is read, and would be lost")
    if file.exists() and not os.access(file, os.W_OK):
        raise _not_writable(file, "permission denied")


def _not_writable(place: Path, why: str) -> CommandFailed:
    return CommandFailed(f"nothing can be written to {place}", cause=why, exit_code=ExitCode.WRONG_USAGE)
