"""A stand-in site leaves for good, whatever its stream ends with just then."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.support.stand_in_site import StandInSite

WITHIN_S = 30.0


@pytest.mark.parametrize("error", [asyncio.InvalidStateError, grpc.RpcError])
def test_a_site_that_leaves_as_its_stream_is_lost_does_not_join_again(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        serving = asyncio.Event()

        async def serve(site: StandInSite, channel: Any) -> None:
            if serving.is_set():
                await asyncio.Event().wait()
            serving.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise error from None

        monkeypatch.setattr(StandInSite, "_serve", serve)
        async with asyncio.timeout(WITHIN_S), StandInSite("127.0.0.1:1", 1, 1):
            await serving.wait()

    asyncio.run(scenario())
