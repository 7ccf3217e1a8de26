"""Databases killed, restarted and frozen under load, a gateway killed: nothing is lost, nothing is double."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from psycopg import waiting
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from gateway.store import keys
from gateway.store import postgres as postgres_driver
from gateway.store.database import CONNECTIONS, open_engine
from gateway.store.errors import StoreUnavailable
from gateway.store.keys import REFRESH_TIMEOUT_S
from gateway.store.queries import OperatorReads
from gateway.store.recorder import Recorder
from gateway.store.store import open_store
from gateway.store.writer import DatabaseWriter
from tests.support.fakes.store import outcome
from tests.support.postgres_server import PostgresServer

QUERIES = 5_000
DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]


async def stored(recorder: Recorder) -> None:
    async with asyncio.timeout(60):
        while not await recorder.flush():
            pass


@asynccontextmanager
async def recording(url: str, folder: Path) -> AsyncIterator[tuple[Recorder, OperatorReads]]:
    engine = open_engine(url)
    recorder = Recorder(folder, DatabaseWriter(engine))
    await recorder.start(background=False)
    try:
        yield recorder, OperatorReads(engine)
    finally:
        await recorder.close()
        await engine.dispose()


@asynccontextmanager
async def ending() -> AsyncIterator[None]:
    """By our own bounds: psycopg's, of 10 s for what it has given up, are longer than a revocation may take
    to hold. Here they are longer than a slow machine takes for ours.
    """
    with pytest.MonkeyPatch.context() as patience:
        for name in ("wait_async", "wait_conn_async"):
            patience.setattr(waiting, name, patient(getattr(waiting, name)))
        async with asyncio.timeout(DEADLINE_S):
            yield


def patient(wait: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def waits(*given: Any, timeout: float | None = None, **more: Any) -> Any:  # noqa: ASYNC109
        return await wait(*given, timeout=timeout and 2 * DEADLINE_S, **more)

    return waits


def test_a_revocation_holds_within_the_time_that_is_promised() -> None:
    assert keys.REFRESH_S + REFRESH_TIMEOUT_S + postgres_driver.CANCEL_TIMEOUT_S < 5.0


@contextmanager
def hurried(recorder: Recorder, timeout_s: float) -> Iterator[None]:
    """Use short timeouts inside the block only; before and after it a slow server has its time."""
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
                async with ending():
                    assert not await recorder.flush()
                recorder.record(outcome("second"))
                assert recorder.pending == 2
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
    async def main() -> None:
        async with open_store(postgres_url, tmp_path) as store:
            with monkeypatch.context() as hurry, postgres.frozen():
                hurry.setattr(keys, "REFRESH_TIMEOUT_S", 0.1)
                async with ending():
                    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s"):
                        await store.keys.refresh()
            await store.keys.refresh()

    asyncio.run(main())


def test_no_call_waits_for_a_server_that_is_silent(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a connection that is open and in use, with a bound of the caller's own and without."""

    async def main() -> None:
        engine = open_engine(postgres_url)
        async with engine.connect() as one, engine.connect() as another:
            for connection in (one, another):
                await connection.scalar(text("SELECT 1"))
            with postgres.frozen(), monkeypatch.context() as hurry:
                async with ending():
                    hurry.setattr(postgres_driver, "ANSWER_TIMEOUT_S", 0.1)
                    with pytest.raises(OperationalError, match=r"no answer within 0\.1 s"):
                        await one.scalar(text("SELECT 1"))
                    hurry.undo()
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await another.scalar(text("SELECT 1"))
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        await engine.dispose()

    asyncio.run(main())


def test_what_is_given_up_ends_at_a_server_that_hears(postgres: PostgresServer, postgres_url: str) -> None:
    async def main() -> None:
        engine = open_engine(postgres_url)
        running = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)'")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), engine.connect() as connection:
                await connection.scalar(text("SELECT pg_sleep(600)"))
        async with asyncio.timeout(60), engine.connect() as connection:
            while await connection.scalar(running):
                await connection.rollback()
        await engine.dispose()

    asyncio.run(main())


def test_a_revocation_is_seen_though_every_open_connection_went_silent(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover: what was connected hears nothing more, what connects anew is answered."""
    monkeypatch.setattr(postgres_driver, "PING_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with (
            between(postgres_url, tmp_path) as (url, fall_silent),
            open_store(postgres_url, tmp_path / "there", pepper="p" * 32, serving=False) as there,
            open_store(url, tmp_path / "here", pepper="p" * 32, serving=False) as here,
        ):
            key, secret = await there.keys.create_key("me")
            await asyncio.gather(*(here.keys.refresh() for _ in range(CONNECTIONS)))
            assert here.keys.authenticate(secret) is not None
            fall_silent()
            await there.keys.revoke_key(key.id)
            await here.keys.refresh()
            assert here.keys.authenticate(secret) is None

    asyncio.run(main())


@asynccontextmanager
async def between(url: str, folder: Path) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield another address of the same server, and a function that silences its open connections."""
    socket = ".s.PGSQL.5432"
    behind = Path(url.partition("?host=")[2])
    pipes: list[asyncio.Task[None]] = []
    ends: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(behind / socket)
        ends.extend((writer, server_writer))
        pipes.append(asyncio.create_task(pipe(reader, server_writer)))
        pipes.append(asyncio.create_task(pipe(server_reader, writer)))

    def fall_silent() -> None:
        for each in pipes:
            each.cancel()

    async with await asyncio.start_unix_server(connected, folder / socket):
        yield url.replace(str(behind), str(folder)), fall_silent
        fall_silent()
        await asyncio.gather(*pipes, return_exceptions=True)
        for end in ends:
            end.close()
            with suppress(OSError):
                await end.wait_closed()


RECORD_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from gateway.store.store import open_store
from tests.support.fakes.store import outcome

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
        try:
            answered = [next(gateway.stdout) for _ in range(2_000)]
        finally:
            gateway.kill()
        answered += [line for line in gateway.stdout if line.endswith("\n")]

    async def main() -> int:
        async with open_store(url, tmp_path) as store:
            await stored(store.recorder)
            return await store.read.count_usage()

    assert asyncio.run(main()) in (len(answered), len(answered) + 1)  # the last may not have been printed
