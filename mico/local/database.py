"""A local federation's database, made ready before its gateway starts: newest schema, its owner's key."""

from __future__ import annotations

from mico.local.folder import Folder, write_private
from mico.store_access import upgrade, with_store

KEY_NAME = "local"


def prepare(folder: Folder, database_url: str) -> str:
    """The owner's API key. A key that is kept in the folder and still valid stays as it is."""
    from gateway.store.store import Store

    upgrade(database_url)
    kept = folder.key()

    async def key(store: Store) -> str:
        await store.keys.refresh()
        if kept and store.keys.authenticate(kept):
            return kept
        _, secret = await store.keys.create_key(KEY_NAME, admin=True)
        return secret

    secret = with_store(database_url, folder.path, key)
    if secret != kept:
        write_private(folder.key_file, secret)
    return secret
