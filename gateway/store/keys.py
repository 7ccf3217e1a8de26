"""Hold the keys in memory, so that a query is authenticated without the database.

The ring reads the keys that changed every REFRESH_S, so a revocation holds on every replica within
REFRESH_S + REFRESH_TIMEOUT_S while the database answers. While it does not, the last known keys stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from hmac import compare_digest
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import Caller
from gateway.store import key_table
from gateway.store.audit import Act
from gateway.store.database import reason
from gateway.store.errors import StoreUnavailable
from gateway.store.key_changes import (
    BEFORE_ALL,
    Fingerprint,
    KeyRow,
    StoredKey,
    changed_keys,
    changed_tenants,
    fingerprint,
    last_number,
    unrevoked,
)
from gateway.store.key_table import DEFAULT_TENANT, KeyInfo, NewKey
from gateway.store.pepper import Pepper, looks_like_a_secret
from gateway.tasks import cancel

logger = logging.getLogger(__name__)

REFRESH_S: Final = 2.0
REFRESH_TIMEOUT_S: Final = 2.0
MIN_REFRESH_INTERVAL_S: Final = 0.25
"""Minimum time between two refreshes, however many unknown keys arrive."""
LOOK_UP_TIMEOUT_S: Final = 1.0
CHANGES_BEFORE_ALL: Final = 2
"""How often changes are read until nothing seems missing: one may come between them and the fingerprint."""
BY_COMMAND: Final = Act()


class _Keys:
    """The keys that are not revoked, as of the change `newest`. `foreign`: made with another pepper."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.by_digest: dict[bytes, StoredKey] = {}
        self.by_id: dict[str, StoredKey] = {}
        self.foreign: dict[str, int] = {}
        self.tenants: dict[str, int] = {}
        self._stamps = 0

    def take(self, rows: Iterable[KeyRow], pepper_id: str) -> None:
        for key, made_with, revoked in rows:
            key_id = key.caller.key_id
            before = self.by_id.pop(key_id, None)
            self._stamps -= self.foreign.pop(key_id, 0) if before is None else before.stamp
            self.by_digest.pop(key.digest, None)
            if revoked:
                continue
            self._stamps += key.stamp
            if made_with == pepper_id:
                self.by_digest[key.digest] = self.by_id[key_id] = key
            else:
                self.foreign[key_id] = key.stamp

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(len(self.by_id) + len(self.foreign), self._stamps, sum(self.tenants.values()))


class KeyRing:
    """Authenticates secrets, and creates, rotates and revokes keys."""

    def __init__(
        self, engine: AsyncEngine, pepper: Pepper, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine = engine
        self._pepper = pepper
        self._clock = clock
        self._known = _Keys(BEFORE_ALL)
        self._loaded = False
        self._refreshing = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._round = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises StoreUnavailable: without a first refresh no key is known."""
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        await cancel(self._task)

    def authenticate(self, secret: str) -> Caller | None:
        """Return the caller; None for a key that is unknown, revoked or expired.

        Does no I/O. An unknown key triggers the next refresh early.
        """
        if not looks_like_a_secret(secret):
            return None
        digest = self._pepper.digest(secret)
        key = self._known.by_digest.get(digest)
        if key is None or not compare_digest(key.digest, digest):
            self._wanted.set()
            return None
        if key.expires_at is not None and self._clock() >= key.expires_at:
            return None
        return key.caller

    async def look_up(self, secret: str) -> Caller | None:
        """Authenticate after the next refresh: another process may have created the key a moment ago.

        All waiting callers share one refresh and wait at most LOOK_UP_TIMEOUT_S. A flood of wrong keys costs
        the database one small query every MIN_REFRESH_INTERVAL_S.
        """
        if looks_like_a_secret(secret):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                    await self.next_refresh()
        return self.authenticate(secret)

    def still_valid(self, key_id: str) -> Caller | None:
        """Return the caller of a key by its id; None once it is revoked or expired. Does no I/O."""
        key = self._known.by_id.get(key_id)
        expired = key is not None and key.expires_at is not None and self._clock() >= key.expires_at
        return None if key is None or expired else key.caller

    def unrevoked(self, key_id: str) -> Caller | None:
        """Return the caller of a key by its id, although it may have expired. Does no I/O.

        For work that was accepted while the key was valid.
        """
        key = self._known.by_id.get(key_id)
        return None if key is None else key.caller

    @property
    def session_key(self) -> bytes:
        """The key that signs sessions: the same on all replicas that share a pepper."""
        return self._pepper.digest("admin session")

    @property
    def all_foreign(self) -> bool:
        """Whether there are keys, and all were made with another pepper, as of the last refresh."""
        return bool(self._known.foreign) and not self._known.by_id

    async def create_key(
        self,
        name: str,
        tenant: str = DEFAULT_TENANT,
        *,
        models: Collection[str] | None = None,
        regions: Collection[str] | None = None,
        admin: bool = False,
        expires_at: float | None = None,
        act: Act = BY_COMMAND,
    ) -> tuple[KeyInfo, str]:
        """Create a key; return it and its secret. It works here at once, on other replicas within seconds."""
        new = NewKey(name, tenant, models, admin, expires_at, regions)
        created = await key_table.create(self._engine, self._pepper, new, self._clock(), act)
        await self._refresh_or_log()
        return created

    async def list_keys(self) -> list[KeyInfo]:
        return await key_table.list_all(self._engine)

    async def list_newest(self, limit: int, before: str | None) -> list[KeyInfo]:
        """Return a page of the keys, newest first. Raises LookupError if there is no key `before`."""
        return await key_table.newest(self._engine, limit, before)

    async def rotate_key(
        self, key_id: str, overlap_s: float, act: Act = BY_COMMAND
    ) -> tuple[KeyInfo, str] | None:
        """A new key and its secret in the place of another, which stays valid for `overlap_s`; None when that
        is not valid any more. Raises OtherPepper.
        """
        now = self._clock()
        rotated = await key_table.rotate(self._engine, self._pepper, key_id, overlap_s, now=now, act=act)
        await self._refresh_or_log()
        return rotated

    async def revoke_key(self, key_id: str, act: Act = BY_COMMAND) -> KeyInfo | None:
        """None when there is no such key. Holds here at once, elsewhere within seconds."""
        revoked = await key_table.revoke(self._engine, key_id, self._clock(), act)
        await self._refresh_or_log()
        return revoked

    async def refresh(self, *, check: bool = True) -> None:
        """Read what changed; without `check` only what this program changes anywhere.

        Raises StoreUnavailable, and keeps what was known.
        """
        try:
            async with (
                self._refreshing,
                asyncio.timeout(REFRESH_TIMEOUT_S) as patience,
                self._engine.connect() as connection,
            ):
                await self._read(connection, patience, check=check)
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {REFRESH_TIMEOUT_S:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc

    async def _read(self, connection: AsyncConnection, patience: asyncio.Timeout, *, check: bool) -> None:
        """Read what changed. `check`: read everything if that leaves a difference, as changes by SQL do."""
        foreign = len(self._known.foreign)
        for _ in range(CHANGES_BEFORE_ALL if self._loaded else 0):
            await self._read_changes(connection, patience)
            if not check or await fingerprint(connection) == self._known.fingerprint():
                break
        else:
            await self._read_all(connection, patience)
        if len(self._known.foreign) > foreign:
            logger.error(
                "%d keys were made with another pepper and do not work here: give all replicas one",
                len(self._known.foreign),
            )

    async def _read_changes(self, connection: AsyncConnection, patience: asyncio.Timeout) -> None:
        known, newest = self._known, await last_number(connection)
        if newest != known.newest:
            changed = await changed_tenants(connection, known.newest)
            async for page in changed_keys(connection, known.newest, changed):
                known.take(page, self._pepper.id)
                _extend(patience)
            known.tenants |= changed
            known.newest = newest

    async def _read_all(self, connection: AsyncConnection, patience: asyncio.Timeout) -> None:
        known = _Keys(await last_number(connection))
        known.tenants = await changed_tenants(connection, 0)
        async for page in unrevoked(connection):
            known.take(page, self._pepper.id)
            _extend(patience)
        self._known, self._loaded = known, True

    async def next_refresh(self) -> None:
        """Wait for a refresh that begins after this call."""
        self._wanted.set()
        await self._round.wait()

    async def _refresh_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        check_at = loop.time() + REFRESH_S
        while True:
            with suppress(TimeoutError):  # wait_for would lose a cancellation that comes with the event
                async with asyncio.timeout_at(check_at):
                    await self._wanted.wait()
            self._wanted.clear()
            done, self._round = self._round, asyncio.Event()
            check = loop.time() >= check_at
            await self._refresh_or_log(check=check)
            if check:
                check_at = loop.time() + REFRESH_S - MIN_REFRESH_INTERVAL_S
            done.set()
            await asyncio.sleep(MIN_REFRESH_INTERVAL_S)

    async def _refresh_or_log(self, *, check: bool = True) -> None:
        try:
            await self.refresh(check=check)
        except StoreUnavailable as exc:
            logger.warning("keys are as of the last refresh: %s", exc)
        except Exception:
            logger.exception("a refresh of the keys went wrong in an unforeseen way")


def _extend(patience: asyncio.Timeout) -> None:
    """Allow REFRESH_TIMEOUT_S more: the database answers, with one page after the other."""
    patience.reschedule(asyncio.get_running_loop().time() + REFRESH_TIMEOUT_S)
