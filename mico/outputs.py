"""Where results are to be written: looked at before the work that they come from, not after it."""

from __future__ import annotations

from pathlib import Path

from mico.errors import CommandFailed, ExitCode


def make_folder(folder: Path) -> None:
    """Raises CommandFailed where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"nothing can be written to {folder}", cause=reason, exit_code=ExitCode.WRONG_USAGE
        ) from error
