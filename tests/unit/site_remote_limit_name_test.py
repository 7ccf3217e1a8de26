"""A limit of tokens reaches a model that takes it by OpenAI's newer name alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from site_engine.core.request import Admission, Finish, Output, Request
from site_engine.engine_client import Listener, Prepared
from site_engine.errors import NotServed
from site_engine.remote.dialects import UNKNOWN
from site_engine.remote.engine import RemoteEngine, ServerProfile
from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server

REFUSAL = {
    "message": "Unsupported parameter: 'max_tokens' is not supported with this model."
    " Use 'max_completion_tokens' instead.",
    "param": "max_tokens",
    "code": "unsupported_parameter",
}
"""As OpenAI words it for its models that reason."""


def test_a_limit_is_told_by_its_newer_name_where_the_server_asks_for_that() -> None:
    async def scenario() -> list[Any]:
        asked: list[dict[str, Any]] = []

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(request.content))
            if "max_tokens" in asked[-1]:
                return httpx.Response(400, json={"error": REFUSAL})
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}
            return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n")

        transport = httpx.MockTransport(answer)
        server = Server("http://server", "", silence_s=60, connections=4, transport=transport)
        profile = ServerProfile({"m": "m"}, UNKNOWN, 64, 1000, 4, 8)
        engine = RemoteEngine(server, profile, lambda: 7.0)
        ends: asyncio.Queue[Finish | NotServed] = asyncio.Queue()

        def hear(outputs: Sequence[Output]) -> None:
            for each in outputs:
                if each.finish is not None:
                    ends.put_nowait(each.finish)

        def reply(said: Admission | NotServed) -> None:
            if isinstance(said, NotServed):
                ends.put_nowait(said)

        engine.listener = Listener(hear, lambda _: None, lambda _: None)
        body = {"model": "m", "messages": [], "max_tokens": 5}
        async with asyncio.timeout(60):
            for name in ("first", "second"):
                payload = HttpRequest("/v1/chat/completions", body)
                prepared = Prepared((), "", guessed_tokens=1, payload=payload)
                engine.submit(prepared, (Request(name, [1]),), reply)
                assert await ends.get() is Finish.LENGTH
        await server.close()
        return [(each.get("max_tokens"), each.get("max_completion_tokens")) for each in asked]

    assert asyncio.run(scenario()) == [(5, None), (None, 5), (None, 5)]
