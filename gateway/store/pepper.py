"""Turn a key's secret into the keyed hash that is stored. Without the pepper the hashes are of no use.

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
MIN_PEPPER_CHARS: Final = 32


class Pepper:
    """The key of the hash. Replicas that share a database must share it. Not shown in `repr`."""

    __slots__ = ("_key", "id")

    def __init__(self, text: str) -> None:
        """Raises StoreError when the text is too short for a secret."""
        if len(text) < MIN_PEPPER_CHARS:
            raise StoreError(
                f"the key pepper needs at least {MIN_PEPPER_CHARS} characters: `openssl rand -hex 32`"
            )
        self._key = blake2b(text.encode(), person=b"mico pepper").digest()
        self.id = blake2b(b"", key=self._key, digest_size=4).hexdigest()

    def digest(self, secret: str) -> bytes:
        return blake2b(secret.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).digest()

    @classmethod
    def of_folder(cls, folder: Path) -> Pepper:
        """Read the pepper from the data folder; create it at the first start."""
        path = folder / "key-pepper"
        if not path.exists():
            _write_once(path, secrets.token_hex(32))
        return cls(path.read_text().strip())


def new_secret() -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def looks_like_a_secret(text: str) -> bool:
    """Return whether the text has the form of our secrets: nothing else needs a database query."""
    return len(text) == SECRET_LENGTH and text.isascii() and text.startswith(SECRET_PREFIX)


def _write_once(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only. Of several processes the first wins."""
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
