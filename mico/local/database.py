"""Preparation of a local federation's database before its gateways start: newest schema, owner's key."""

from __future__ import annotations

from mico.local.folder import Folder, write_private
from mico.store_access import upgrade, with_store

KEY_NAME = "local"


def prepare_database(folder: Folder, database_url: str) -> str:
    """Upgrade the schema and return the owner's API key; a valid key that the folder keeps is reused."""
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
