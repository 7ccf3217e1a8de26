"""Leases slices of the quotas in the background, ahead of need: no query waits for the database.

While the database is away the slices held go on being used. What happens once the lease has run out is a
setting: go on with them (`hold`), or turn away the callers that have quotas (`refuse`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

from gateway.quotas.ledger import QuotaLedger
from gateway.quotas.limits import Claim, LimitId, WhenAway
from gateway.store.errors import StoreUnavailable
from gateway.store.slices import Left, NameTaken, Round

log = logging.getLogger(__name__)

EVERY_S: Final = 0.5
REST_S: Final = 0.1
"""The least time between two rounds, however many queries find a slice too small."""
MORE_WITHIN_S: Final = 2.0
"""How long a query waits for its replica to lease more, before it is told that its quota is used up."""


class Slices(Protocol):
    @property
    def lease_s(self) -> float: ...

    async def join(self) -> list[Left]: ...

    async def leave(self) -> None: ...

    def rename(self) -> None: ...

    async def limits(self) -> dict[LimitId, int]: ...

    async def round(self, restless: Iterable[LimitId], ask: Callable[[LimitId], Claim | None]) -> Round: ...


class Leases:
    def __init__(
        self, slices: Slices, when_away: WhenAway, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quotas = QuotaLedger(lapsed=self._lapsed)
        self._slices = slices
        self._when_away = when_away
        self._clock = clock
        self._renewed_s = float("-inf")
        self._away = False
        self._wanted = asyncio.Event()
        self._round = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, background: bool = True) -> None:
        """Raises StoreUnavailable."""
        left = await self._slices.join()
        self.quotas.set_limits(await self._slices.limits())
        for each in left:
            self.quotas.restore(*each)
        await self.renew()
        if background:
            self._task = asyncio.create_task(self._renew_for_ever())

    @property
    def silent_s(self) -> float:
        """Since the last round that the database answered. There are two a second, whatever is asked."""
        return self._clock() - self._renewed_s

    async def close(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with suppress(StoreUnavailable, NameTaken):
            await self._renew_once()  # what was used since the last round counts, of a month at least
            await self._slices.leave()

    async def more(self) -> None:
        """For a query that found a slice too small: returns when there may be more, in vain if need be."""
        if self._away:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(MORE_WITHIN_S):
                for _ in range(3):  # ours asks, the others give up, ours takes
                    self._wanted.set()
                    await self._round.wait()

    async def renew(self) -> None:
        """One round. Raises StoreUnavailable, and what is held stays."""
        try:
            await self._renew_once()
        except NameTaken as exc:
            log.error("another gateway is called %s too: give each replica a name of its own", exc)
            self._slices.rename()
            self.quotas.forget_slices()

    async def _renew_once(self) -> None:
        began_s = self._clock()
        done = await self._slices.round(list(self.quotas.unsettled()), self.quotas.claim)
        self._renewed_s = began_s
        self.quotas.replicas = done.replicas
        surplus = [self.quotas.apply_grant(*each) for each in done.grants]
        if any(surplus) and done.replicas > 1:  # nobody waits for what the only replica gives back
            self._wanted.set()
        if done.limits is not None:
            self.quotas.set_limits(done.limits)
            await self._renew_once()  # settle what is new

    async def _renew_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S - REST_S):
                    await self._wanted.wait()
            self._wanted.clear()
            done, self._round = self._round, asyncio.Event()
            await self._renew_or_log()
            done.set()
            await asyncio.sleep(REST_S)

    async def _renew_or_log(self) -> None:
        try:
            await self.renew()
        except StoreUnavailable as exc:
            if not self._away:
                log.warning("quotas go on with the slices leased last: %s", exc)
            self._away = True
        except Exception:
            log.exception("leasing went wrong in an unforeseen way")
            self._away = True
        else:
            self._away = False

    def _lapsed(self) -> bool:
        return self._when_away is WhenAway.REFUSE and self.silent_s >= self._slices.lease_s
