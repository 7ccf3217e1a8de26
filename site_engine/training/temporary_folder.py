"""Make a folder for the time that a process runs, which also goes when the process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder with a lock on it; remove it in the end, and before it those of killed processes.

    `prefix` is of this function's folders alone: one of this host that no process has locked is taken for
    left behind. Locks of other hosts, which may share the place of all such folders, are not seen here.
    """
    prefix = f"{prefix}{socket.gethostname()}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_unlocked(path)
    folder, descriptor = _locked(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_unlocked(path: Path) -> None:
    """Remove a folder of this user. Raises OSError if a process has locked it, and for what is no folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _locked(prefix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor whose lock ends with the process."""
    while True:  # another process may take a folder for left behind before it is locked
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)
