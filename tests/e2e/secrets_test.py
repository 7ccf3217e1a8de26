"""Canaries: real processes at debug level are given secrets, led down good and bad paths, and nothing of what
they say, keep or show has a secret in it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.announced import CERTIFIED, CLIENTS, SITES, port_of
from tests.support.openai_server import OpenAIServer, openai_server

pytestmark = pytest.mark.e2e

PATIENCE_S = 300.0
ASK = {"model": "letters", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}


def canary(name: str) -> str:
    return f"{name}-{secrets.token_hex(16)}"


@dataclass
class Told:
    """Everything that was said, by who said it."""

    secrets: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def secret(self, name: str, value: str | None = None) -> str:
        self.secrets[name] = value or canary(name)
        return self.secrets[name]

    def hear(self, who: str, text: str) -> None:
        self.texts[who] = self.texts.get(who, "") + text

    def leaks(self) -> set[tuple[str, str]]:
        """Return each source with the secret that it leaked; half of a secret counts as one."""
        found = set()
        for name, secret in self.secrets.items():
            half = len(secret) // 2
            for who, text in self.texts.items():
                if secret[:half] in text or secret[-half:] in text:
                    found.add((who, name))
        return found


@dataclass
class Place:
    folder: Path
    told: Told
    environment: dict[str, str]

    def mico(self, *arguments: str, **more: str) -> str:
        """Return what a command prints to stdout; its stderr is recorded."""
        command = [sys.executable, "-m", "mico", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        self.told.hear(f"mico {' '.join(arguments[:2])}, stderr", done.stderr)
        return done.stdout

    @asynccontextmanager
    async def process(self, name: str, *arguments: str, **more: str) -> AsyncIterator[Path]:
        """Run a process within the context; its log is recorded when it has ended."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            running = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "mico",
                *arguments,
                cwd=self.folder,
                env=self.environment | more,
                stdout=file,
                stderr=file,
            )
        try:
            yield log
        finally:
            if running.returncode is None:
                running.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(running.wait(), PATIENCE_S)
            except TimeoutError:
                running.kill()
                raise
            self.told.hear(f"log of {name}", log.read_text())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MICO_", "OPENAI_"))}
    return Place(tmp_path, Told(), kept | {"MICO_DATABASE_URL": f"sqlite:///{tmp_path}/mico.db"})


async def until_said(log: Path, words: str) -> str:
    """Return the log as soon as it has the words."""
    end = time.monotonic() + PATIENCE_S
    while words not in (said := await asyncio.to_thread(log.read_text)):
        assert time.monotonic() < end, f"{log.name} never said {words!r}:\n{said[-2000:]}"
        await asyncio.sleep(0.05)
    return said


def test_no_secret_is_said_kept_or_shown(place: Place) -> None:
    asyncio.run(play(place))
    offline(place)
    told = place.told
    assert {
        "api_key",
        "site_token",
        "join_secret",
        "provider_key",
        "database_password",
    } <= told.secrets.keys()
    assert told.leaks() == set()
    log = told.texts["log of gateway"]
    for words in (
        "was turned away: the site token is missing",
        "alpha joined",
        "beta joined",
        '"status":401',
    ):
        assert words in log  # both kinds of path were walked
    assert "***" in told.texts["answers"]


async def play(place: Place) -> None:
    told, folder = place.told, place.folder
    place.mico("db", "upgrade")
    place.mico("pki", "init")
    pepper = told.secret("pepper")
    key = place.mico("keys", "create", "canary", "--admin", MICO_GATEWAY_KEY_PEPPER=pepper).strip()
    wanted = {
        "MICO_GATEWAY_HTTP_PORT": "0",
        "MICO_GATEWAY_GRPC_PORT": "0",
        "MICO_GATEWAY_MTLS_PORT": "0",
        "MICO_GATEWAY_DATABASE_URL": place.environment["MICO_DATABASE_URL"],
        "MICO_GATEWAY_KEY_PEPPER": pepper,
        "MICO_GATEWAY_PKI": "pki",
        "MICO_GATEWAY_SITE_TOKENS": told.secret("site_token"),
        "MICO_GATEWAY_LOG_LEVEL": "debug",
        "MICO_GATEWAY_DRAIN_S": "1",
    }
    site = {
        "MICO_SITE_LOG_LEVEL": "debug",
        "MICO_SITE_TLS": "true",
        "MICO_SITE_TLS_CA": "pki/ca.pem",
        "MICO_SITE_DRAIN_S": "1",
    }
    provider = told.secret("provider_key")
    async with (
        openai_server(key=provider, repeats_keys=True) as server,
        place.process("gateway", "gateway", **wanted) as log,
    ):
        said = await until_said(log, CLIENTS)
        http, grpc, mtls = (port_of(who, said) for who in (CLIENTS, SITES, CERTIFIED))
        alpha = site | {
            "MICO_SITE_SITE": "alpha",
            "MICO_SITE_GATEWAYS": f"127.0.0.1:{grpc}",
            "MICO_SITE_KEY_ENV": "PROVIDER",
            "PROVIDER": provider,
        }
        beta = site | {
            "MICO_SITE_SITE": "beta",
            "MICO_SITE_GATEWAYS": f"127.0.0.1:{mtls}",
            "MICO_SITE_IDENTITY": "beta",
            "MICO_SITE_ENROL_AT": f"127.0.0.1:{grpc}",
            "MICO_SITE_JOIN_SECRET": told.secret("join_secret", place.mico("pki", "invite", "beta").strip()),
            "MICO_SITE_KEY_FILE": "provider-key",
        }
        (folder / "provider-key").write_text(provider)
        serve = ("site", "--engine", "openai", "--url", server.url)
        async with place.process("stranger", *serve, **alpha, MICO_SITE_TOKEN=told.secret("wrong_token")):
            await until_said(log, "the site token is missing or wrong")
        async with (
            place.process("alpha", *serve, **alpha, MICO_SITE_TOKEN=told.secrets["site_token"]),
            place.process("beta", *serve, **beta),
        ):
            await until_said(log, "site alpha joined")
            await until_said(log, "site beta joined")
            await ask(place, f"http://127.0.0.1:{http}", told.secret("api_key", key), server)
    for file in (folder / "mico.db", folder / "mico.db-wal"):
        if file.exists():
            told.hear("the database", file.read_bytes().decode("latin-1"))


async def ask(place: Place, url: str, key: str, server: OpenAIServer) -> None:
    """Good paths and bad ones; every answer is heard with its headers."""
    told = place.told
    wrong = told.secret("wrong_key", f"mico-{secrets.token_urlsafe(32)}")

    async def heard(method: str, path: str, *, by: str = key, **more: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {by}"} | dict(more.pop("headers", {}))  # type: ignore[call-overload]
        response = await client.request(method, path, headers=headers, **more)  # type: ignore[arg-type]
        told.hear("answers", f"{response.status_code} {response.headers} {response.text}\n")
        return response

    chat = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        end = time.monotonic() + PATIENCE_S
        while (await heard("GET", "/ready")).status_code != 200:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        for _ in range(4):
            assert (await heard("POST", chat, json=ASK)).status_code == 200
        assert (await heard("POST", chat, json={**ASK, "stream": True})).text.endswith("[DONE]\n\n")
        assert (await heard("POST", chat, json=ASK, by=wrong)).status_code == 401
        assert (await heard("POST", chat, json=ASK, headers={"authorization": wrong})).status_code == 401
        assert (await heard("GET", f"/v1/models?api_key={key}", by=wrong)).status_code == 401
        assert (
            await heard("POST", chat, content=b"{", headers={"content-type": "application/json"})
        ).status_code == 400
        assert (await heard("POST", chat, json={**ASK, "unknown": 1, "n": "x"})).status_code == 400
        login = await heard("POST", "/admin/api/session", json={"key": wrong}, headers={"origin": url})
        assert login.status_code == 401
        login = await heard("POST", "/admin/api/session", json={"key": key}, headers={"origin": url})
        assert login.status_code == 200
        for path in ("/metrics", "/admin/api/sites", "/v1/models", "/version", "/nowhere"):
            await heard("GET", path)
        server.key = canary("another")  # from now on it refuses the key that its sites have, and repeats it
        assert (await heard("POST", chat, json=ASK)).status_code == 502


def offline(place: Place) -> None:
    """Run commands that need no gateway, and a gateway that cannot start."""
    password = place.told.secret("database_password")
    url = {"MICO_DATABASE_URL": f"postgresql://mico:{password}@127.0.0.1:9/mico"}
    key = {"MICO_API_KEY": place.told.secrets["api_key"]}
    for command in (("config", "show", "--json"), ("doctor", "--json")):
        place.told.hear(f"mico {command[0]}", place.mico(*command, **url, **key))
    settings = {
        "MICO_GATEWAY_DATABASE_URL": url["MICO_DATABASE_URL"],
        "MICO_GATEWAY_SITE_TOKENS": place.told.secrets["site_token"],
        "MICO_GATEWAY_KEY_PEPPER": place.told.secrets["pepper"],
        "MICO_GATEWAY_LOG_LEVEL": "debug",
    }
    place.told.hear("mico gateway", place.mico("--debug", "gateway", **settings))
    wrong = {"MICO_SITE_JOIN_SECRET": place.told.secrets["join_secret"], "MICO_SITE_SLOTS": "none"}
    place.told.hear(
        "mico site", place.mico("site", **wrong, MICO_SITE_TOKEN=place.told.secrets["site_token"])
    )
