"""One gateway of two processes: it starts, serves, heals and ends as one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx
import pytest

from gateway.store.audit import Act
from gateway.store.store import open_store
from mico.errors import ExitCode
from mico.local.plan import free_port, to_toml
from migrations import upgrade
from tests.support.child_processes import is_there
from tests.support.local_federation import eventually
from tests.support.plain_http import HTTP
from tests.support.site_process import start_site
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

TOKEN, PEPPER = "a-site-token", "a pepper of this test, long enough"
STARTED_WITHIN_S, ENDED_WITHIN_S = 300.0, 90.0
ACT = Act("test", "workers")
QUERIES = re.compile(r"^mico_requests_total{[^}]*outcome=\"answered\"[^}]*} ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Workers:
    """The gateway, and the ports for operators of both workers."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    join_at: str  # where sites dial
    operators: tuple[int, int]
    key: str

    def ask(self, tokens: int = 4, key: str | None = None) -> httpx.Response:
        """One query over a connection of its own."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "One, two."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return HTTP.post(url, json=body, headers={"authorization": f"Bearer {key or self.key}"})

    def ready(self) -> list[bool]:
        """Return by worker whether the site is linked to it."""
        return self.well("/ready")

    def well(self, path: str) -> list[bool]:
        return [_status(f"http://127.0.0.1:{port}{path}") == 200 for port in self.operators]

    def answered(self) -> list[int]:
        """Return by worker the queries that it answered since it started."""
        pages = [HTTP.get(f"http://127.0.0.1:{port}/metrics").text for port in self.operators]
        return [round(sum(map(float, QUERIES.findall(page)))) for page in pages]

    @property
    def pids(self) -> list[int]:
        """The worker processes, which write their logs with nobody between."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [
            pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]


def _status(url: str) -> int:
    try:
        return HTTP.get(url, timeout=5).status_code
    except httpx.TransportError:
        return 0


async def _new_key(url: str, folder: Path) -> str:
    async with open_store(url, folder, pepper=PEPPER, serving=False) as store:
        return (await store.keys.create_key("workers", "shop", admin=True, act=ACT))[1]


def _ports() -> tuple[int, int]:
    """A port for sites and one for operators; two above each is free too."""
    while True:
        first, second = free_port(), free_port()
        if abs(first - second) > 2 and _status(f"http://127.0.0.1:{first + 2}") == 0:
            return first, second


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    url = f"sqlite+aiosqlite:///{tmp_path}/mico.db"
    upgrade(url)
    key = asyncio.run(_new_key(url, tmp_path))
    port, (grpc_port, metrics_port) = free_port(), _ports()
    settings = {
        "workers": 2,
        "http_port": port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "database_url": url,
        "folder": str(tmp_path),
        "site_tokens": [TOKEN],
        "key_pepper": PEPPER,
    }
    config = _settings("gateway", tmp_path, settings)
    command = [sys.executable, "-m", "mico", "gateway", "--config", str(config)]
    with (tmp_path / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(command, env=_outside(), stdout=log, stderr=log)
    with _ended(gateway) as process:
        operators = (metrics_port, metrics_port + 2)
        yield Workers(tmp_path, process, port, f"127.0.0.1:{grpc_port}", operators, key)


@pytest.fixture
def site(workers: Workers) -> Iterator[None]:
    settings = {
        "site": "alpha",
        "model": str(write_tiny_model(workers.folder / "tiny")),
        "served_model": "tiny",
        "gateways": [workers.join_at],
        "token": TOKEN,
        "threads": 1,
        "slots": 4,
        "kv_tokens": 4096,
        "iteration_floor_s": 0.01,
    }
    config = _settings("site", workers.folder, settings)
    with _ended(start_site(config, workers.folder / "site.log", _outside())):
        eventually(lambda: all(workers.ready()), "the site is linked to both workers", STARTED_WITHIN_S)
        yield


def _settings(kind: str, folder: Path, settings: dict[str, object]) -> Path:
    config = folder / f"{kind}.toml"
    config.write_text(to_toml(settings))
    return config


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MICO_")}


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a gateway or a site at last."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.usefixtures("site")
def test_two_workers_serve_heal_and_end_as_one(workers: Workers) -> None:
    _until_both_answered(workers)
    _refuse_a_second_gateway(workers)

    killed = workers.pids[0]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not all(workers.ready()), "one is gone")
    eventually(lambda: _is_answered(workers), "the other answers, or the new one")
    eventually(lambda: all(workers.ready()), "it is back, and the site too", STARTED_WITHIN_S)
    assert killed not in workers.pids
    _until_both_answered(workers)

    _revoke_a_key(workers)
    _end_with_streams(workers)


def test_workers_end_when_the_first_process_is_killed(workers: Workers) -> None:
    eventually(lambda: all(workers.well("/health")), "both serve", STARTED_WITHIN_S)
    pids = workers.pids
    assert len(pids) == 2
    workers.process.kill()
    workers.process.wait()
    # Whoever inherits them may never wait for them.
    eventually(lambda: not any(is_there(pid, as_zombie=False) for pid in pids), "both ended", ENDED_WITHIN_S)


def _is_answered(workers: Workers) -> bool:
    """Ask once; the ports of a process that was killed close one by one, and its connections break."""
    with suppress(httpx.TransportError):
        return workers.ask().status_code == 200
    return False


def _until_both_answered(workers: Workers) -> None:
    texts = set()

    def both() -> bool:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: workers.ask(), range(8)))
        assert {each.status_code for each in answers} == {200}
        texts.update(each.json()["choices"][0]["message"]["content"] for each in answers)
        return min(workers.answered()) > 0

    eventually(both, "both workers answered", STARTED_WITHIN_S)
    assert len(texts) == 1


def _refuse_a_second_gateway(workers: Workers) -> None:
    command = [sys.executable, "-m", "mico", "gateway", "--config", str(workers.folder / "gateway.toml")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=ENDED_WITHIN_S, check=False)
    assert second.returncode == ExitCode.WRONG_USAGE
    assert f"127.0.0.1:{workers.port}: taken" in " ".join(second.stderr.split())


def _revoke_a_key(workers: Workers) -> None:
    keys = f"http://127.0.0.1:{workers.port}/admin/api/keys"
    admin = {"authorization": f"Bearer {workers.key}"}
    new = {"name": "other", "tenant": "shop", "reason": "test"}
    made = HTTP.post(keys, json=new, headers=admin).raise_for_status().json()

    def all_say(status: int) -> bool:
        return {workers.ask(key=made["key"]).status_code for _ in range(12)} == {status}

    eventually(lambda: all_say(200), "both take the key")
    revoke = f"{keys}/{made['id']}/revoke"
    HTTP.post(revoke, json={"reason": "test"}, headers=admin).raise_for_status()
    eventually(lambda: all_say(401), "both refuse it")


def _end_with_streams(workers: Workers) -> None:
    body = {"model": "tiny", "prompt": "One", "max_tokens": 100, "ignore_eos": True, "stream": True}
    url, headers = (
        f"http://127.0.0.1:{workers.port}/v1/completions",
        {"authorization": f"Bearer {workers.key}"},
    )

    def read(began: Event) -> str:
        last = ""
        with HTTP.stream("POST", url, json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                began.set()
                last = line or last
        return last

    began, pids = [Event() for _ in range(4)], workers.pids
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(read, each) for each in began]
        assert all(each.wait(STARTED_WITHIN_S) for each in began)
        workers.process.terminate()
        assert [each.result() for each in streams] == ["data: [DONE]"] * 4
    assert workers.process.wait(ENDED_WITHIN_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
