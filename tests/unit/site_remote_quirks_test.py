"""A provider that refuses how it is asked is asked otherwise, from then on at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import httpx
import pytest

from site_engine.core.request import Finish, Output, Request
from site_engine.engine_client import Listener, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.remote.dialects import UNKNOWN
from site_engine.remote.engine import RemoteEngine, ServerProfile
from site_engine.remote.quirks import Quirks, change_for
from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server

OPENAI = {
    "error": {
        "message": "Unsupported parameter: 'max_tokens' is not supported with this model."
        " Use 'max_completion_tokens' instead.",
        "param": "max_tokens",
        "code": "unsupported_parameter",
    }
}
"""Of its models that reason."""
MISTRAL = {
    "object": "error",
    "message": {
        "detail": [
            {
                "type": "extra_forbidden",
                "loc": ["body", "stream_options", "include_usage"],
                "msg": "Extra inputs are not permitted",
            }
        ]
    },
}
Body: TypeAlias = dict[str, Any]
GROQ = {
    "error": {
        "message": "'messages.0' : for 'role:assistant' the following must be satisfied[('messages.0' : "
        "property 'reasoning_content' is unsupported)]"
    }
}
LIMITED: Body = {"model": "m", "messages": [], "max_tokens": 5}
WITH_USAGE: Body = {"model": "m", "messages": [], "stream_options": {"include_usage": True}}


def ask(refuse: Callable[[Body], httpx.Response | None], *bodies: Body) -> tuple[list[Body], list[Any]]:
    """Send requests one after the other; return what the server was asked, and how each ended."""
    asked: list[Body] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}
        said = f"data: {json.dumps({'choices': [choice]})}\n\n"
        return refuse(asked[-1]) or httpx.Response(200, text=said)

    async def scenario() -> list[Any]:
        transport = httpx.MockTransport(answer)
        server = Server("http://server", "", silence_s=60, connections=4, transport=transport)
        profile = ServerProfile({"m": "m"}, UNKNOWN, 64, 1000, 4, 8)
        engine = RemoteEngine(server, profile, lambda: 7.0)
        ends: asyncio.Queue[Finish | Reason] = asyncio.Queue()

        def hear(outputs: Sequence[Output]) -> None:
            for each in outputs:
                if each.finish is not None:
                    ends.put_nowait(each.finish)

        def reply(said: NotServed | None) -> None:
            if isinstance(said, NotServed):
                ends.put_nowait(said.reason)

        engine.listener = Listener(hear, lambda _: None, lambda _: None)
        found = []
        async with asyncio.timeout(60):
            for number, body in enumerate(bodies):
                payload = HttpRequest("/v1/chat/completions", body)
                prepared = Prepared((), "", guessed_tokens=1, payload=payload)
                engine.submit(prepared, (Request(str(number), [1]),), reply)
                found.append(await ends.get())
        await server.close()
        return found

    return asked, asyncio.run(scenario())


def asked_for(body: Body, refused: str, status: int, refusal: Body) -> list[Body]:
    """Return what a server is asked for two requests, which refuses what has the field."""

    def refuse(asked: Body) -> httpx.Response | None:
        return httpx.Response(status, json=refusal) if refused in json.dumps(asked) else None

    asked, ends = ask(refuse, body, body)
    assert ends == [Finish.LENGTH] * 2
    return asked


def test_a_limit_is_told_by_its_newer_name() -> None:
    told = {"model": "m", "messages": [], "max_completion_tokens": 5}
    assert asked_for(LIMITED, '"max_tokens"', 400, OPENAI) == [LIMITED, told, told]


@pytest.mark.parametrize("refusal", [MISTRAL, MISTRAL["message"]])
def test_usage_is_not_asked_for(refusal: Body) -> None:
    told = {"model": "m", "messages": []}
    assert asked_for(WITH_USAGE, "stream_options", 422, refusal) == [WITH_USAGE, told, told]


def test_earlier_reasoning_is_not_told() -> None:
    turn = {"role": "assistant", "content": "42"}
    body = {"model": "m", "messages": [{**turn, "reasoning_content": "Six sevens."}]}
    told = {"model": "m", "messages": [turn]}
    assert asked_for(body, "reasoning_content", 400, GROQ) == [body, told, told]


def test_what_a_model_needs_of_chats_changes_no_other_request() -> None:
    quirks = Quirks()
    refused = HttpRequest("/v1/chat/completions", {"model": "m", "messages": [{"reasoning_content": "so"}]})
    change = change_for(refused, GROQ["error"]["message"])
    assert change is not None
    quirks.learn(refused, [change])
    completion = HttpRequest("/v1/completions", {"model": "m", "prompt": "a"})
    assert quirks.apply(completion) == completion


def test_a_refusal_that_repeats_words_of_the_client_teaches_nothing() -> None:
    """Else a client could keep a site from counting what everybody uses."""

    def refuse(asked: Body) -> httpx.Response | None:
        return httpx.Response(400, json={"message": f"no {asked['tool']}"}) if "tool" in asked else None

    asked, ends = ask(refuse, {**WITH_USAGE, "tool": "stream_options"}, WITH_USAGE)
    assert ends == [Reason.INVALID, Finish.LENGTH]
    assert asked[-1] == WITH_USAGE


def test_a_refusal_that_repeats_the_whole_request_is_no_wish_of_the_server() -> None:
    """As vLLM's, which has in it what was asked of each model: invalid requests were sent twice."""

    def refuse(asked: Body) -> httpx.Response:
        detail = [{"type": "value_error", "loc": ["body"], "msg": "no such tool", "input": asked}]
        return httpx.Response(400, json={"error": {"message": str(detail), "code": 400}})

    asked, ends = ask(refuse, WITH_USAGE)
    assert ends == [Reason.INVALID]
    assert asked == [WITH_USAGE]


def test_words_of_a_client_teach_nothing_although_the_second_try_was_answered() -> None:
    """By another replica behind the server's address, which takes what the first one refused."""
    refusals = [httpx.Response(400, json={"message": "no grammar: stream_options"})]
    odd = {**WITH_USAGE, "guided_grammar": "stream_options"}
    asked, ends = ask(lambda _: refusals.pop() if refusals else None, odd, WITH_USAGE)
    assert ends == [Finish.LENGTH] * 2
    assert asked[-1] == WITH_USAGE
