"""The rhythm of lease renewals: a surplus is returned at once only where another replica may wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from gateway.quotas.leases import Leases
from gateway.quotas.limits import Claim, Grant, Kind, LimitId, Scope, WhenAway
from gateway.quotas.slices import GrantedSlice, LeaseRound, PreviousSlice

LIMIT = LimitId(Scope.TENANT, "shop", Kind.TOKENS)


class Shrinking:
    """A database in which each round finds that the slice should be smaller; counts the rounds."""

    lease_s = 60.0

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.rounds = 0
        self.several = asyncio.Event()

    async def join(self) -> list[PreviousSlice]:
        return []

    async def leave(self) -> None:
        """Nothing is kept."""

    def rename(self) -> None:
        raise AssertionError("the name is ours")

    async def limits(self) -> dict[LimitId, int]:
        return {LIMIT: 1_000_000}

    async def round(
        self, unsettled: Iterable[LimitId], claim_of: Callable[[LimitId], Claim | None]
    ) -> LeaseRound:
        self.rounds += 1
        if self.rounds > 3:
            self.several.set()
        claim = claim_of(LIMIT)
        assert claim is not None
        grant = Grant(amount=1_000 - self.rounds, target=900 - self.rounds, elsewhere=0, reachable=1_000)
        return LeaseRound(("this", "other")[: self.replicas], [GrantedSlice(LIMIT, claim, grant)])


@pytest.mark.parametrize(("replicas", "hurries"), [(1, False), (2, True)])
def test_a_surplus_is_given_back_at_once_only_to_others(replicas: int, hurries: bool) -> None:
    async def scenario() -> None:
        slices = Shrinking(replicas)
        leases = Leases(slices, WhenAway.HOLD)
        await leases.start(background=False)
        assert leases._round_wanted.is_set() is hurries

    asyncio.run(scenario())


def test_replicas_that_share_renew_faster_than_their_rhythm() -> None:
    async def scenario() -> None:
        slices = Shrinking(replicas=2)
        leases = Leases(slices, WhenAway.HOLD)
        await leases.start()
        async with asyncio.timeout(60):
            await slices.several.wait()
        await leases.close()

    asyncio.run(scenario())
