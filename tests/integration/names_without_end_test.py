"""Names that clients choose, in any number, stay nowhere in the process of a gateway."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

from gateway.http.app import create_http
from gateway.outcome import Outcome
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.publisher import SnapshotPublisher
from tests.support.answers import backend_of
from tests.support.fakes.edge import KEY
from tests.support.fakes.federation import scene

REQUESTS = 2_000
CANCELLED_TIMERS = 200
"""asyncio keeps a hundred cancelled timers, each with the request id of its context, before it drops them."""
MARK = "never-seen-before-"


def kept_names() -> list[str]:
    """Return the marked texts that any object of the process refers to."""
    gc.collect()
    found: list[str] = []
    for holder in gc.get_objects():
        waiting = [holder]
        while waiting:
            each = waiting.pop()
            keys = tuple(each) if isinstance(each, dict) else ()  # texts that `get_referents` leaves out
            for held in (*keys, *gc.get_referents(each)):
                if isinstance(held, str | bytes):
                    text = held if isinstance(held, str) else held.decode("latin-1")
                    if MARK in text and text != MARK:
                        found.append(text)
                elif isinstance(held, dict | tuple) and not gc.is_tracked(held):
                    waiting.append(held)  # of texts and numbers alone: `get_objects` leaves it out
    return found


async def post(app: Any, key: str, address: str, body: dict[str, object], **headers: str) -> int:
    """Send one request to an ASGI application. Return the status."""
    raw = json.dumps(body).encode()
    named = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": (address, 1),
        "server": ("edge", 80),
        "state": {},
    }
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


async def flood(app: Any) -> None:
    for number in range(REQUESTS):
        name = f"{MARK}{number}"
        says = [{"role": "user", "content": name}]
        body = {"model": name, "user": name, "messages": says, "prompt_cache_key": name, name: name}
        headers = {"x-request-id": name, "user-agent": name}
        known = asyncio.create_task(post(app, KEY, "10.0.0.1", body, **headers))
        unknown = asyncio.create_task(post(app, name, f"10.1.{number // 256}.{number % 256}", body))
        assert await asyncio.gather(known, unknown) == [404, 401]


def test_no_name_that_a_client_chose_outlives_its_request() -> None:
    async def main() -> None:
        async with scene() as here:
            await here.site("a")
            metrics = Metrics(here.gateway.directory, lambda: here.gateway.live)
            metrics.register(here.gateway.forecasts)
            publisher = SnapshotPublisher(here.gateway.directory, "g1")
            observed = 0

            def record(outcome: Outcome) -> None:
                nonlocal observed
                observed += 1
                metrics.observe(outcome)
                publisher.observe(outcome)
                here.gateway.forecasts.observe(outcome)

            here.gateway.record = record
            await flood(create_http(backend_of(here)))
            await here.gateway.wait_settled()
            publisher.tick()
            assert observed == REQUESTS
            assert MARK not in metrics.text().decode()
            assert len(set(kept_names())) <= CANCELLED_TIMERS
            assert here.nothing_is_left()

    asyncio.run(main())
