"""What replicas share is dated by the clock of their database: their own may be hours apart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from gateway.store.clock import DatabaseClock
from gateway.store.store import open_store
from tests.integration.gateway_ending_test import whole_gateway

AHEAD_S = 7_200.0


class AheadClock(DatabaseClock):
    """The clock of a database that is ahead of this machine."""

    def __call__(self) -> float:
        return super().__call__() + AHEAD_S


def test_the_page_orders_keys_and_the_audit_go_by_the_databases_clock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock a replica that is ahead ended the others' orders, and deleted what they show."""
    monkeypatch.setattr("gateway.store.store.DatabaseClock", AheadClock)
    now, why = time.time() + AHEAD_S - 1.0, {"reason": "a trial"}

    async def scenario() -> None:
        async with whole_gateway(tmp_path, caplog) as (client, _):
            async with open_store(f"sqlite:///{tmp_path / 'mico.db'}", tmp_path, serving=False) as store:
                _, boss = await store.keys.create_key("boss", admin=True)
                _, expired = await store.keys.create_key("app", expires_at=time.time() + AHEAD_S / 2)
            client.headers["authorization"] = f"Bearer {boss}"
            while not (page := (await client.get("/admin/api/overview")).json())["sites"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert page["at"] >= now
            for path, body in (("sites/alpha/drain", {"for_s": 60}), ("tenants", {"name": "shop"})):
                done = await client.post(f"/admin/api/{path}", json=why | body)
                assert done.status_code == 200, done.text
            entries = (await client.get("/admin/api/audit")).json()["entries"]
            assert min(each["at"] for each in entries) >= now
            assert max(each["until_at"] or 0.0 for each in entries) >= now + 60.0
            made = await client.post("/admin/api/keys", json=why | {"name": "new", "days": 1})
            assert made.json()["expires_at"] >= now + 86_400.0
            client.headers["authorization"] = f"Bearer {expired}"
            assert (await client.get("/v1/models")).status_code == 401
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(scenario())
