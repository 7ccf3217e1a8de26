"""Turns a key's secret into what is stored of it: a keyed hash. Without the pepper the database says nothing.

A secret carries 256 random bits, so a fast hash is enough: there is nothing to guess.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from gateway.store.errors import StoreError

SECRET_PREFIX: Final = "mico-"
SECRET_BYTES: Final = 32
SECRET_LENGTH: Final = len(SECRET_PREFIX) + 43
PEPPER_LEAST_CHARACTERS: Final = 32


class Pepper:
    """Replicas that share a database must share it. Never shown, also not in `repr`."""

    __slots__ = ("_key", "id")

    def __init__(self, text: str) -> None:
        """Raises StoreError when it is too short to be a secret."""
        if len(text) < PEPPER_LEAST_CHARACTERS:
            raise StoreError(
                f"the key pepper needs at least {PEPPER_LEAST_CHARACTERS} characters: `openssl rand -hex 32`"
            )
        self._key = blake2b(text.encode(), person=b"mico pepper").digest()
        self.id = blake2b(b"", key=self._key, digest_size=4).hexdigest()

    def digest(self, secret: str) -> bytes:
        return blake2b(secret.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).digest()

    @classmethod
    def of_folder(cls, folder: Path) -> Pepper:
        """The pepper that lies in the data folder, made at the first start."""
        path = folder / "key-pepper"
        if not path.exists():
            _write_once(path, secrets.token_hex(32))
        return cls(path.read_text().strip())


def new_secret() -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def looks_like_a_secret(text: str) -> bool:
    """Whether it could be one of ours: what cannot needs no look into the database."""
    return len(text) == SECRET_LENGTH and text.isascii() and text.startswith(SECRET_PREFIX)


def _write_once(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only; the first of several processes wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
