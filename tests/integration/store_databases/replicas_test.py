"""Two replicas at work on one Postgres, in small: one quota over both, from the keys to the slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.errors import TooMany
from gateway.query.answer import answer
from gateway.quotas.leases import Leases
from gateway.quotas.limits import Kind, Scope, WhenAway
from gateway.store.audit import Act
from gateway.store.store import Store, open_store
from tests.support.fakes.federation import DEADLINE_S, Scene, ScriptedSite, scene

ACT = Act("test", "test")
PEPPER = "p" * 32
TOKENS_EACH = 12
"""Of an answer: 7 of the prompt, as the fakes count it, and 5."""


@asynccontextmanager
async def gateway(url: str, folder: Path, name: str) -> AsyncIterator[tuple[Store, Scene, ScriptedSite]]:
    async with open_store(url, folder / name, name=name, pepper=PEPPER) as store:
        leases = Leases(store.slices, WhenAway.HOLD)
        await leases.start()
        try:
            async with scene(quotas=leases.quotas, lease_more=leases.lease_more) as here:
                yield store, here, await here.site("a", slots=50)
        finally:
            await leases.close()


async def ask(store: Store, here: Scene, site: ScriptedSite, secret: str) -> bool:
    """Return whether the query was answered; False where the quota was used up."""
    await site.report()
    caller = store.keys.authenticate(secret)
    assert caller is not None

    async def whole() -> None:
        async for _ in answer(here.gateway, here.query(caller=caller, max_tokens=5)):
            pass

    asking, assigned = asyncio.create_task(whole()), asyncio.create_task(site.assigned())
    await asyncio.wait({asking, assigned}, return_when=asyncio.FIRST_COMPLETED)
    if assigned.done():
        await site.finish(assigned.result(), "hello", 5)
        await asking
        return True
    assigned.cancel()
    await asyncio.gather(assigned, return_exceptions=True)
    assert isinstance(asking.exception(), TooMany)
    return False


def test_two_replicas_grant_one_quota_between_them_whichever_is_asked(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.quotas.meter.WINDOW_S", float("inf"))  # the test may take its minutes
    monkeypatch.setattr("gateway.quotas.leases.MORE_WITHIN_S", DEADLINE_S)
    monkeypatch.setattr("gateway.quotas.leases.ROUND_EVERY_S", 0.1)
    monkeypatch.setattr("gateway.quotas.leases.MIN_PAUSE_S", 0.01)

    async def main() -> None:
        async with (
            gateway(postgres_url, tmp_path, "a") as first,
            gateway(postgres_url, tmp_path, "b") as second,
        ):
            store = first[0]
            _, secret = await store.keys.create_key("app", "shop")
            await second[0].keys.refresh()
            limit = 30 * TOKENS_EACH
            await store.quotas.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: limit}, ACT)
            while not all(here.gateway.quotas._limits for _, here, _ in (first, second)):
                await first[1].gateway.lease_more()
                await second[1].gateway.lease_more()
            granted = 0
            for _ in range(20):  # all of it at one, which has to ask the other for more
                granted += await ask(*first, secret)
            for _ in range(20):
                granted += await ask(*second, secret)
            assert 0.9 * limit <= granted * TOKENS_EACH <= limit

    asyncio.run(main())
