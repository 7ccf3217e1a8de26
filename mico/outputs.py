"""Where results are to be written: looked at before the work that they come from, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from mico.errors import CommandFailed, ExitCode


def make_folder(folder: Path) -> None:
    """Raises CommandFailed where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(folder, "permission denied")


def make_room(folder: Path) -> None:
    """For a folder that is not made before there is something to put into it. Raises CommandFailed."""
    make_folder(folder if folder.exists() else folder.parent)


def make_way(file: Path, *, read: Path | None = None) -> None:
    """For a file that is yet to be written. Raises CommandFailed where it can't be, or would be written over
    what it comes from."""
    make_folder(file.parent)
    if file.is_dir():
        raise _refused(file, "it is a folder, not a file")
    if read is not None and file.exists() and file.samefile(read):
        raise _refused(file, "it is what is read, and would be lost")
    if file.exists() and not os.access(file, os.W_OK):
        raise _refused(file, "permission denied")


def _refused(place: Path, why: str) -> CommandFailed:
    return CommandFailed(f"nothing can be written to {place}", cause=why, exit_code=ExitCode.WRONG_USAGE)
