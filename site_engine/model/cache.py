"""The cache of converted models: one folder for each source, made whole or not at all.

Entries are replaced when their source changes, and never removed: `mico models list` shows them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NOTE = "mico.json"
STAGING = ".new"


def models_folder() -> Path:
    """Return `mico/models` in the user's cache. Raises OSError if the user has no home."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError("there is no home for a cache; set XDG_CACHE_HOME") from error
    return Path(cache).expanduser().absolute() / "mico" / "models"


def note_of(folder: Path) -> dict[str, Any] | None:
    """Return what an entry was made from, or None if there is none."""
    try:
        note: dict[str, Any] = json.loads((folder / NOTE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return note


def entries() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folder and the note of each entry."""
    for folder in sorted(models_folder().glob("*/[!.]*")):
        if note := note_of(folder):
            yield folder, note


def make_once(folder: Path, note: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """Return `folder`, which `make` fills on first use, and again when `note` differs from the entry's.

    `make` is called with an empty folder beside it, which is renamed once it is complete. One entry at a time
    is made, by whatever process. Raises what `make` raises; nothing is left then.
    """
    if note_of(folder) == note:
        return folder
    models_folder().mkdir(parents=True, exist_ok=True)
    with locked(models_folder()):
        if note_of(folder) == note:  # another process has made it meanwhile
            return folder
        staging = folder.parent / STAGING
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        try:
            staging.mkdir(parents=True)
            make(staging)
            (staging / NOTE).write_text(json.dumps(note, indent=2), "utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()  # empty only if nothing was made
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
