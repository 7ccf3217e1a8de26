"""The database hangs, and queries go on as if it were there: nothing on their way waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gateway.domain import Caller
from gateway.outcome import Outcome
from gateway.query.answer import answer
from gateway.quotas.leases import Leases
from gateway.quotas.limits import Kind, Scope, WhenAway
from gateway.store.audit import Act
from gateway.store.store import open_store
from tests.support.fakes.federation import scene, until
from tests.support.postgres_server import PostgresServer

QUERIES = 200
ACT = Act("test", "test")


def test_a_silent_database_delays_no_query_and_every_answer_has_its_row(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    """Keys, quotas and usage all in use: a statement that any query awaited would hang with the server."""

    async def main() -> None:
        async with open_store(postgres_url, tmp_path, name="a") as store:
            key, secret = await store.keys.create_key("app", "shop")
            limits = {Kind.TOKENS: 10**6, Kind.REQUESTS: 10**4, Kind.QUERIES: 50, Kind.MONTH: 10**9}
            await store.quotas.set_quotas(Scope.TENANT, "shop", limits, ACT)
            await store.quotas.set_quotas(Scope.KEY, key.id, {Kind.TOKENS: 10**6}, ACT)
            leases = Leases(store.slices, WhenAway.HOLD)
            await leases.start()
            try:
                async with scene(quotas=leases.quotas, lease_more=leases.lease_more) as here:
                    site = await here.site("a", slots=50)
                    here.gateway.record = recorded(store.recorder.record, here.outcomes)

                    async def one() -> None:
                        caller = store.keys.authenticate(secret)
                        assert caller is not None
                        async for _ in answer(here.gateway, here.query(caller=caller)):
                            pass

                    async def served() -> None:
                        for _ in range(QUERIES):
                            await site.finish(await site.assigned(), "word", 3)

                    serving = asyncio.create_task(served())
                    with postgres.frozen():
                        for _ in range(QUERIES // 20):
                            await asyncio.gather(*(one() for _ in range(20)))
                        assert store.keys.authenticate(secret) is not None
                        assert len(here.outcomes) == QUERIES
                    await serving
                    assert leases.quotas.status(Caller(key.id, "shop"), Kind.QUERIES) is not None
                    assert here.nothing_is_left()
                await until(lambda: store.recorder.pending == 0, "all rows stored")
                assert await store.read.count_usage() == QUERIES
            finally:
                await leases.close()

    asyncio.run(main())


def recorded(record: Callable[[Outcome], None], outcomes: list[Outcome]) -> Callable[[Outcome], None]:
    def both(outcome: Outcome) -> None:
        record(outcome)
        outcomes.append(outcome)

    return both
