"""Leases slices of the quotas in the background, ahead of need, so that no query waits for the database.

While the database is unavailable, the leased slices stay in use. Once the lease has expired, a setting
decides whether to keep using them (`hold`) or to refuse callers that have quotas (`refuse`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from gateway.quotas.ledger import QuotaLedger
from gateway.quotas.limits import LimitId, WhenAway
from gateway.quotas.slices import NameTaken, Slices, SlicesUnavailable
from gateway.tasks import cancel

log = logging.getLogger(__name__)

ROUND_EVERY_S: Final = 0.5
MIN_PAUSE_S: Final = 0.1
"""The shortest pause between two rounds, in seconds, however many queries find a slice too small."""


class Leases:
    def __init__(
        self,
        slices: Slices,
        when_away: WhenAway,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.quotas = QuotaLedger(lapsed=self._lapsed, clock=clock, unix_time=unix_time)
        self.replicas: tuple[str, ...] = ()  # the live replicas, as of the last round
        self._slices = slices
        self._when_away = when_away
        self._clock = clock
        self._renewed_s = float("-inf")
        self._away = False
        self._round_wanted = asyncio.Event()
        self._round_done = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, background: bool = True) -> None:
        """Join, restore the slices of an earlier process, and renew. Raises SlicesUnavailable."""
        previous = await self._slices.join()
        await self._replace(await self._slices.limits())
        for each in previous:
            self.quotas.restore(*each)
        await self.renew()
        if background:
            self._task = asyncio.create_task(self._renew_for_ever())

    @property
    def since_renewed_s(self) -> float:
        """Return the seconds since the last successful round began. There are two rounds per second."""
        return self._clock() - self._renewed_s

    async def close(self) -> None:
        if self._task is None:
            return
        await cancel(self._task)
        self._task = None
        with suppress(SlicesUnavailable, NameTaken):
            await self._renew_once()  # record the usage since the last round, for the monthly quotas
            await self._slices.leave()

    async def lease_more(self) -> bool:
        """Wait for one round that begins after this call. Return whether it succeeded; False at once while
        the database is unavailable.
        """
        if self._away:
            return False
        self._round_wanted.set()
        await self._round_done.wait()
        return not self._away

    async def renew(self) -> None:
        """Run one round. Raises SlicesUnavailable, which leaves the leased slices unchanged."""
        try:
            await self._renew_once()
        except NameTaken as exc:
            log.error("another gateway is called %s too: give each replica a name of its own", exc)
            self._slices.rename()
            self.quotas.forget_slices()

    async def _renew_once(self) -> None:
        began_s = self._clock()
        done = await self._slices.round(self.quotas.unsettled(), self.quotas.claim)
        self._renewed_s = began_s
        self.replicas = done.replicas
        self.quotas.replicas = len(done.replicas)
        surplus = [self.quotas.apply_grant(*each) for each in done.grants]
        if any(surplus) and len(done.replicas) > 1:  # return the surplus soon, if others can use it
            self._round_wanted.set()
        if done.freed:
            self.quotas.forget_slices()
        elif done.restored:
            self.quotas.write_anew()
        if done.limits is not None:
            await self._replace(done.limits)
        if done.freed or done.restored or done.limits is not None:
            await self._renew_once()  # settle the new limits and slices

    async def _replace(self, limits: Mapping[LimitId, int]) -> None:
        for _ in self.quotas.replace_limits(limits):
            await asyncio.sleep(0)

    async def _renew_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_EVERY_S - MIN_PAUSE_S):
                    await self._round_wanted.wait()
            self._round_wanted.clear()
            done, self._round_done = self._round_done, asyncio.Event()
            await self._renew_or_log()
            done.set()
            await asyncio.sleep(MIN_PAUSE_S)

    async def _renew_or_log(self) -> None:
        try:
            await self.renew()
        except SlicesUnavailable as exc:
            if not self._away:
                log.warning("quotas go on with the slices leased last: %s", exc)
            self._away = True
        except Exception:
            log.exception("leasing went wrong in an unforeseen way")
            self._away = True
        else:
            self._away = False

    def _lapsed(self) -> bool:
        return self._when_away is WhenAway.REFUSE and self.since_renewed_s >= self._slices.lease_s
