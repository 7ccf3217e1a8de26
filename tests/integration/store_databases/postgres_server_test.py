"""The tests' own Postgres starts and goes on, whatever the tests do beside it."""

from __future__ import annotations

import asyncio

from tests.support.fakes.federation import scene
from tests.support.postgres_server import PostgresServer

LINES = 2_000
"""Of a hundred characters: more than a pipe holds."""


def test_a_server_that_has_much_to_say_does_not_stand_still(postgres: PostgresServer) -> None:
    said = f"FOR line IN 1..{LINES} LOOP RAISE LOG '%', repeat('x', 100); END LOOP;"
    postgres.execute(f"DO $$BEGIN {said} END$$")
    postgres.execute("SELECT 1")


def test_its_programs_start_beside_links_that_are_busy(postgres: PostgresServer) -> None:
    async def main() -> None:
        async with scene() as here:
            site, started = await here.site("a"), asyncio.Event()

            async def report() -> None:
                while not started.is_set():
                    await site.report()

            reporting = asyncio.create_task(report())
            try:
                for _ in range(20):
                    await asyncio.to_thread(postgres._run, "initdb", "--version")
            finally:
                started.set()
                await reporting

    asyncio.run(main())
