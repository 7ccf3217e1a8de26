"""Two replicas at work on one Postgres, in small: one quota over both, from the keys to the slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.errors import TooMany
from gateway.prompt import Chat, Message
from gateway.query.answer import answer
from gateway.quotas.leases import Leases
from gateway.quotas.limits import Kind, Scope, WhenAway
from gateway.store.audit import Act
from gateway.store.store import Store, open_store
from tests.support.answers import collect
from tests.support.fakes.federation import DEADLINE_S, Scene, ScriptedSite, scene

ACT = Act("test", "test")
PEPPER = "p" * 32
USD_PER_MTOK = 1_000.0
NANO_USD_EACH = 5_000_000
TOKENS_EACH = 12
"""Of an answer: 7 of the prompt, as the fakes count it, and 5."""


@asynccontextmanager
async def gateway(url: str, folder: Path, name: str) -> AsyncIterator[tuple[Store, Scene, ScriptedSite]]:
    async with open_store(url, folder / name, name=name, pepper=PEPPER) as store:
        leases = Leases(store.slices, WhenAway.HOLD)
        await leases.start()
        try:
            async with scene(quotas=leases.quotas, lease_more=leases.lease_more) as here:
                yield store, here, await here.site("a", slots=50, output_usd_per_mtok=USD_PER_MTOK)
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


@pytest.mark.parametrize("count", [2, 4])
def test_one_query_may_need_most_of_a_quota_that_nobody_uses(
    postgres_url: str, tmp_path: Path, count: int
) -> None:
    limit = 1_000
    prompt = Chat((Message("user", "word" * 850),))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            replicas = [
                await stack.enter_async_context(gateway(postgres_url, tmp_path, f"r{number}"))
                for number in range(count)
            ]
            store, here, site = replicas[0]
            _, secret = await store.keys.create_key("app", "shop")
            limits = {Kind.TOKENS: limit, Kind.MONTH: limit}
            await store.quotas.set_quotas(Scope.TENANT, "shop", limits, ACT)
            for _, each, _ in replicas:
                while not each.gateway.quotas._limits:
                    await each.gateway.lease_more()
            caller = store.keys.authenticate(secret)
            assert caller is not None
            query = replace(here.query(caller=caller, max_tokens=5), prompt=prompt)
            assert 0.85 * limit <= query.prompt_tokens_guess <= 0.9 * limit
            asking = asyncio.create_task(collect(here, query))
            assigned = asyncio.create_task(site.assigned())
            await asyncio.wait({asking, assigned}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                assigned.cancel()
            else:
                await site.finish(assigned.result(), "hello", 5)
            await asking

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "each"), [(Kind.TOKENS, TOKENS_EACH), (Kind.BUDGET, NANO_USD_EACH)])
def test_two_replicas_grant_one_quota_between_them_whichever_is_asked(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, each: int
) -> None:
    monkeypatch.setattr("gateway.quotas.meter.WINDOW_S", float("inf"))  # the test may take its minutes
    monkeypatch.setattr("gateway.query.quotas.LEASE_WITHIN_S", DEADLINE_S)
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
            limit = 30 * each
            await store.quotas.set_quotas(Scope.TENANT, "shop", {kind: limit}, ACT)
            while not all(here.gateway.quotas._limits for _, here, _ in (first, second)):
                await first[1].gateway.lease_more()
                await second[1].gateway.lease_more()
            granted = 0
            for _ in range(20):  # all of it at one, which has to ask the other for more
                granted += await ask(*first, secret)
            for _ in range(20):
                granted += await ask(*second, secret)
            assert 0.9 * limit <= granted * each <= limit

    asyncio.run(main())
