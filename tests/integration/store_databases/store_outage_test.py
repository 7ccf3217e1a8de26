"""Databases killed, restarted and frozen under load, a gateway killed: nothing is lost, nothing is double."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.store import keys
from gateway.store.engine import CONNECTIONS, open_engine
from gateway.store.errors import StoreUnavailable
from gateway.store.queries import Reads
from gateway.store.recorder import Recorder
from gateway.store.store import open_store
from gateway.store.writer import DatabaseWriter
from tests.fakes.federation import until
from tests.fakes.store import outcome
from tests.integration.store_databases.server import PostgresServer

QUERIES = 5_000
ROOT = Path(__file__).parents[3]


async def stored(recorder: Recorder) -> None:
    async with asyncio.timeout(60):
        while not await recorder.flush():
            pass


@asynccontextmanager
async def recording(url: str, folder: Path) -> AsyncIterator[tuple[Recorder, Reads]]:
    engine = open_engine(url)
    recorder = Recorder(folder, DatabaseWriter(engine))
    await recorder.start(background=False)
    try:
        yield recorder, Reads(engine)
    finally:
        await recorder.close()
        await engine.dispose()


def given_up(task: asyncio.Task[Any]) -> bool:
    """Its time is up; of a connection that was open it may be told only later, by the server."""
    return task.done() or task.cancelling() > 0


@contextmanager
def hurried(recorder: Recorder, timeout_s: float) -> Iterator[None]:
    """A server that answers, however slowly, is given its time before and afterwards."""
    writer: Any = recorder._writer
    usual_s, writer._timeout_s = writer._timeout_s, timeout_s
    try:
        yield
    finally:
        writer._timeout_s = usual_s


def test_a_server_killed_and_restarted_under_load_loses_and_doubles_nothing(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    async def main() -> None:
        flushes: list[bool] = []
        done = asyncio.Event()

        async def flush_for_ever(recorder: Recorder) -> None:
            while not done.is_set():
                flushes.append(await recorder.flush())
                await asyncio.sleep(0)

        async with recording(postgres_url, tmp_path) as (recorder, read):
            flushing = asyncio.create_task(flush_for_ever(recorder))
            for number in range(QUERIES):
                recorder.record(outcome(f"q{number}"))
                if number % 50 == 0:
                    await asyncio.sleep(0)
                if number % 2_000 == 1_000:
                    await asyncio.to_thread(postgres.kill)
                if number % 2_000 == 1_500:
                    await asyncio.to_thread(postgres.start)
            done.set()
            await flushing
            await stored(recorder)
            assert False in flushes
            assert True in flushes
            assert await read.count_usage() == QUERIES
            assert (recorder.pending, recorder.health.lost) == (0, 0)

    asyncio.run(main())


def test_a_server_that_falls_silent_stops_nobody(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with recording(postgres_url, tmp_path) as (recorder, read):
            recorder.record(outcome("before"))
            await stored(recorder)
            with postgres.frozen(), hurried(recorder, 0.1):
                recorder.record(outcome("first"))
                flushing = asyncio.create_task(recorder.flush())
                await until(lambda: given_up(flushing), "the flush gives up")
                recorder.record(outcome("second"))
                assert recorder.pending == 2
            assert not await flushing
            await stored(recorder)
            assert await read.count_usage() == 3

    asyncio.run(main())


def test_a_silent_server_empties_no_pool(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(postgres_url, tmp_path) as (recorder, read):
            with postgres.frozen(), hurried(recorder, 0.05):
                for number in range(2 * CONNECTIONS):
                    recorder.record(outcome(f"q{number}"))
                    assert not await recorder.flush()
            await stored(recorder)
            assert await read.count_usage() == 2 * CONNECTIONS

    asyncio.run(main())


def test_keys_stay_good_while_the_server_is_away(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_store(postgres_url, tmp_path) as store:
            info, secret = await store.keys.create_key("me")
            await asyncio.to_thread(postgres.kill)
            with pytest.raises(StoreUnavailable):
                await store.keys.refresh()
            assert store.keys.authenticate(secret) is not None
            await asyncio.to_thread(postgres.start)
            assert await store.keys.revoke_key(info.id) is not None
            assert store.keys.authenticate(secret) is None

    asyncio.run(main())


def test_a_refresh_gives_up_in_time(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REFRESH_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with open_store(postgres_url, tmp_path) as store:
            with postgres.frozen():
                refreshing = asyncio.create_task(store.keys.refresh())
                await until(lambda: given_up(refreshing), "the refresh gives up")
            with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s"):
                await refreshing
            monkeypatch.undo()
            await store.keys.refresh()

    asyncio.run(main())


RECORD_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from gateway.store.store import open_store
from tests.fakes.store import outcome

async def main():
    async with open_store(sys.argv[1], Path(sys.argv[2])) as store:
        for number in itertools.count():
            store.recorder.record(outcome(f"q{number}"))
            print(number, flush=True)
            await asyncio.sleep(0)

asyncio.run(main())
"""


def test_a_killed_gateway_has_recorded_all_that_it_answered(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RECORD_FOR_EVER, url, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        answered = [next(gateway.stdout) for _ in range(2_000)]
        gateway.kill()
        answered += [line for line in gateway.stdout if line.endswith("\n")]

    async def main() -> int:
        async with open_store(url, tmp_path) as store:
            await stored(store.recorder)
            return await store.read.count_usage()

    assert asyncio.run(main()) in (len(answered), len(answered) + 1)  # the last may not have been printed
