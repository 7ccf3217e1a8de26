"""Work accepted under a key that is not known here yet waits for the keys: unread is not revoked."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import migrations
from gateway import app
from gateway.config import GatewayConfig
from gateway.job_host import JobHost
from gateway.store import keys
from gateway.store.errors import StoreUnavailable
from tests.support.fakes.federation import DEADLINE_S, TOKEN


def test_work_is_told_that_the_keys_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Callable[[], Awaitable[None]]] = []
    begun = asyncio.Event()

    def opened(really: Callable[..., Any], host: JobHost) -> Any:
        found.append(host.refresh_keys)
        if len(found) == 2:
            begun.set()
        return really(host)

    for name in ("open_batches", "open_tuning"):
        monkeypatch.setattr(app, name, partial(opened, getattr(app, name)))
    url = f"sqlite:///{tmp_path}/mico.db"
    migrations.upgrade(url)
    config = GatewayConfig(
        http_port=0, grpc_port=0, mtls_port=0, database_url=url, folder=tmp_path, site_tokens=(TOKEN,)
    )

    async def main() -> None:
        serving = asyncio.create_task(app.serve(config))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await begun.wait()
                for refresh_keys in found:
                    await refresh_keys()
                monkeypatch.setattr(keys, "REFRESH_TIMEOUT_S", 0.0)  # no database answers in time
                for refresh_keys in found:
                    with pytest.raises(StoreUnavailable):
                        await refresh_keys()
                os.kill(os.getpid(), signal.SIGTERM)
                assert await serving == 0
        finally:
            serving.cancel()

    asyncio.run(main())
