"""Sessions of a site with its gateways, for tests of the link."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from site_engine.federation.link import LinkTimeouts
from tests.support.site_fakes import CONTEXT_TOKENS
from tests.support.site_gateway import Session
from wire import federation_pb2 as pb

FREE_TOKENS = 2 * CONTEXT_TOKENS

HURRIED = LinkTimeouts(backoff_first_s=0.01, backoff_longest_s=0.02, goodbye_s=0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def idle(load: pb.Load) -> bool:
    counts = (load.running, load.pending, load.token_load, load.kv_reserved_tokens)
    return not any(counts) and load.kv_free_tokens == FREE_TOKENS


async def falls_idle(session: Session) -> None:
    await session.until(lambda: any(idle(load) for load in session.received("load")[-1:]))
