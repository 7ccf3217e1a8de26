"""Create temporary folders. Folders left by killed processes are removed by a later call."""

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
    """Remove the folders of killed processes, then yield a new, locked folder and remove it on exit.

    `prefix` must be unique to folders of this function: a folder of this host that no process has locked is
    removed. Folders carry the host name, since hosts sharing the parent folder do not see each other's locks.
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
    """Remove a folder of this user. Raises OSError if a process has locked it or `path` is not a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _locked(prefix: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock until the process ends."""
    while True:  # another process may remove the folder before it is locked
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)
