"""The API's promises about streamed answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionChunk

from gateway.domain import AnswerEvent, Delta, Finish, Query, Usage
from gateway.errors import Overloaded, UpstreamLost
from tests.support.fakes.edge import (
    MODEL,
    NO_DETAILS,
    OPENING,
    Edge,
    Script,
    chat,
    chat_body,
    error_of,
    events_of,
    fail,
    on_loopback,
    play,
    run,
    scripted,
)

WITH_USAGE = {"include_usage": True}


def chunks_of(answer: Any = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a streamed chat, each validated as sent over the wire."""
    response, _ = chat(answer, stream=True, **fields)
    assert response.status_code == 200, response.text
    events = events_of(response.content)
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
    return events


def test_a_stream_is_data_frames_that_end_with_done() -> None:
    response, _ = chat(scripted("é\n\ndata: x\r\n", "\u2028 😀"), stream=True)
    texts = [event["choices"][0]["delta"].get("content", "") for event in events_of(response.content)]
    assert "".join(texts) == "é\n\ndata: x\r\n\u2028 😀"


def test_no_frame_has_what_clients_take_for_the_end_of_a_line() -> None:
    text = 'one\x85two\u2028three\u2029"four\u2028'
    response, _ = chat(scripted(text), stream=True, logprobs=True)
    events = events_of(response.content)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    assert response.content.decode().splitlines() == response.content.decode().split("\n")[:-1]


def test_an_error_before_the_first_token_has_its_status() -> None:
    response, _ = chat(fail(Overloaded("All sites are full.", retry_after_s=3)), stream=True)
    assert error_of(response, 503)["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"


def test_every_choice_begins_with_its_role() -> None:
    seen: set[int] = set()
    for chunk in chunks_of(n=3):
        choice = chunk["choices"][0]
        if choice["index"] not in seen:
            assert choice["delta"] == {"role": "assistant", "content": ""}
        else:
            assert "role" not in choice["delta"]
        seen.add(choice["index"])
    assert seen == {0, 1, 2}


def test_a_chunk_has_one_choice_under_a_constant_head() -> None:
    chunks = chunks_of(n=3)
    assert {len(chunk["choices"]) for chunk in chunks} == {1}
    heads = {(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}
    ((identifier, *rest),) = heads
    assert identifier.startswith("chatcmpl-")
    assert rest == [1_750_000_000, MODEL, "chat.completion.chunk", "rev-1"]


@pytest.mark.parametrize("finish", list(Finish))
def test_every_choice_of_a_stream_ends_once(finish: Finish) -> None:
    last: dict[int, dict[str, Any]] = {}
    ends = []
    for chunk in chunks_of(scripted("a", "b", finish=finish), n=2):
        last[chunk["choices"][0]["index"]] = chunk["choices"][0]
        ends += [chunk["choices"][0]["index"]] if chunk["choices"][0]["finish_reason"] else []
    assert sorted(ends) == [0, 1]
    assert all((choice["delta"], choice["finish_reason"]) == ({}, finish.value) for choice in last.values())


def test_usage_comes_in_a_chunk_of_its_own() -> None:
    *chunks, last = chunks_of(stream_options=WITH_USAGE)
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, **NO_DETAILS}


@pytest.mark.parametrize("fields", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
def test_usage_is_absent_unless_requested(fields: dict[str, Any]) -> None:
    chunks = chunks_of(**fields)
    assert chunks and all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_continuous_usage_grows_in_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(scripted("a", "b"), n=2, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == [0, 0, 1, 2, 3, 3, 4, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}
    assert all("usage" not in chunk for chunk in chunks_of(stream_options={"continuous_usage_stats": True}))


LOST = fail(UpstreamLost("Site alpha was lost."), after=[OPENING, Delta(0, "Hel", 1)])


def test_a_lost_site_is_an_error_event_then_done() -> None:
    response, _ = chat(LOST, stream=True)
    *chunks, last = events_of(response.content)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "Hel"}
    assert last == {
        "error": {
            "message": "Site alpha was lost.",
            "type": "server_error",
            "param": None,
            "code": "upstream_lost",
        }
    }


def test_the_sdk_raises_on_a_lost_site() -> None:
    async def scenario(edge: Edge) -> None:
        said = []
        with pytest.raises(openai.APIError) as raised:
            async for chunk in await edge.sdk.chat.completions.create(**chat_body(), stream=True):
                said.append(chunk.choices[0].delta.content)
        assert said == ["", "Hel"]
        assert raised.value.code == "upstream_lost"

    run(scenario, LOST)


def test_a_stream_without_a_finish_reason_is_an_error() -> None:
    for pieces in ([Delta(0, "half", 1)], [Delta(0, "half", 1), Usage(7, 1)]):
        response, _ = chat(play(OPENING, *pieces), stream=True)
        assert events_of(response.content)[-1]["error"]["code"] == "upstream_lost"


def test_a_character_is_never_split() -> None:
    whole = "naïve 日本語 👩‍👩‍👧 e\u0301"
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(scripted(*whole))]
    assert "".join(texts) == whole
    assert "\ufffd" not in "".join(texts)


def test_a_failover_before_the_first_token_shows_only_in_the_attempts() -> None:
    response, _ = chat(scripted("x", opening=replace(OPENING, site="beta", attempts=2)), stream=True)
    assert response.headers["x-mico-attempts"] == "2"
    assert response.headers["x-mico-site"] == "beta"
    assert not any("error" in event for event in events_of(response.content))


def test_logprobs_come_with_the_text_they_belong_to() -> None:
    chunks = chunks_of(scripted("a", "b"), logprobs=True, top_logprobs=1)
    entries = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == ["a", "b"]


def test_the_sdks_own_stream_joins_the_answer() -> None:
    async def scenario(edge: Edge) -> None:
        async with edge.sdk.chat.completions.stream(**chat_body(), stream_options=WITH_USAGE) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello world"
        assert final.usage is not None
        assert final.usage.total_tokens == 9

    run(scenario)


def test_pieces_leave_as_they_come() -> None:
    """The first text is sent before the second exists."""

    async def main() -> None:
        seen = asyncio.Event()

        async def answer(query: Query) -> Any:
            pieces: list[AnswerEvent] = [OPENING, Delta(0, "first", 1)]
            for piece in pieces:
                yield piece
            await seen.wait()
            yield Delta(0, "second", 2, finish=Finish.STOP)
            yield Usage(7, 2)

        async with on_loopback(Script(answer)) as (edge, _):
            said = []
            async for chunk in await edge.sdk.chat.completions.create(**chat_body(), stream=True):
                said.append(chunk.choices[0].delta.content)
                if "first" in said:
                    seen.set()
            assert said == ["", "first", "second", None]

    asyncio.run(main())
