"""The API's promises about POST /v1/messages: what a request means as a chat, whole and streamed answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.message_body import message_body
from gateway.anthropic.message_stream import MessageEncoder
from gateway.anthropic.messages_request import read_message_request
from gateway.domain import AnswerEvent, Delta, Finish, Opening, Query, ToolCall, Usage
from gateway.openai.fields import Fields, Problems
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import Choice, UnaryResponse
from gateway.prompt import Chat, Message
from tests.support.anthropic_requests import ADD, body, error_of
from tests.support.event_streams import message_events
from tests.support.fakes.edge import KEY, MODEL, OPENING, Edge, play, post, run, scripted

HEAD = ResponseHead("msg_q1", 1_750_000_000, MODEL, "rev-1")


def read(**fields: Any) -> GenerationRequest:
    problems = Problems()
    request = read_message_request(Fields(body(**fields), problems))
    problems.raise_any()
    return request


def chat_of(**fields: Any) -> Chat:
    (prompt,) = read(**fields).prompts
    assert isinstance(prompt, Chat)
    return prompt


# ---- reading


def test_system_texts_and_turns_are_a_chat() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Hi there"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ],
    )
    assert chat.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi there"),
        Message("assistant", "Hello"),
        Message("user", "Bye"),
    )


def test_blocks_of_text_are_lines_of_their_own_but_those_of_an_assistant_are_one_text() -> None:
    """As vLLM hands the parts of a message to a template that wants one text."""
    two = [{"type": "text", "text": text} for text in ("<note>Be kind.</note>", "", "What is it?")]
    result = {"type": "tool_result", "tool_use_id": "a", "content": two}
    chat = chat_of(
        system=two,
        messages=[
            {"role": "user", "content": two},
            {"role": "assistant", "content": two},
            {"role": "user", "content": [result, *two]},
        ],
    )
    lines = "<note>Be kind.</note>\nWhat is it?"
    assert [(each.role, each.content) for each in chat.messages] == [
        ("system", lines),
        ("user", lines),
        ("assistant", lines.replace("\n", "")),
        ("tool", lines),
        ("user", lines),
    ]


def test_calls_and_their_results_are_messages_in_order() -> None:
    chat = chat_of(
        messages=[
            {"role": "user", "content": "1 + 2"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "Adding."},
                    {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}},
                    {"type": "tool_use", "id": "b", "name": "now", "input": ""},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ]
    )
    _, turn, result, question = chat.messages
    assert turn.content == "Adding."
    assert json.loads(turn.tool_calls_json) == [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert (result.role, result.content, result.tool_call_id) == ("tool", "3", "a")
    assert question == Message("user", "And now?")


@pytest.mark.parametrize(
    ("tool_choice", "choice", "name", "single"),
    [
        (None, "auto", "", False),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", "", True),
        ({"type": "any"}, "required", "", False),
        ({"type": "tool", "name": "add"}, "named", "add", False),
    ],
)
def test_tools_reach_the_site(tool_choice: Any, choice: str, name: str, single: bool) -> None:
    chat = chat_of(tools=[ADD], tool_choice=tool_choice)
    (tool,) = json.loads(chat.tools_json)
    assert tool["function"] == {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {}},
    }
    assert (chat.tool_choice, chat.tool_name, chat.single_tool_call) == (choice, name, single)
    assert chat_of(tools=[ADD], tool_choice={"type": "none"}).tools_json == ""


def test_limits_stops_and_schemas_reach_the_site() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sampling = read(
        max_tokens=20,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END", "\n\n"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    ).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (20, 0.5, 0.9, 5)
    assert sampling.stop == ("END", "\n\n")
    assert json.loads(sampling.guided_json) == schema
    beta = read(output_format={"type": "json_schema", "schema": schema}, output_config={"effort": "low"})
    assert json.loads(beta.sampling.guided_json) == schema


def test_max_tokens_above_the_context_mean_as_many_as_fit() -> None:
    response, script = post("/v1/messages", body(max_tokens=100_000))
    assert response.status_code == 200
    assert script.query.sampling.max_tokens == 100_000


# ---- answers


def test_a_whole_answer_has_anthropics_shape() -> None:
    response, script = post("/v1/messages", body())
    assert response.status_code == 200, response.text
    message = AnthropicMessage.model_validate(response.json(), strict=True)
    assert (message.content[0].type, message.stop_reason) == ("text", "end_turn")
    assert response.json()["content"][0]["text"] == "Hello world"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 2)
    assert message.id == f"msg_{script.query.id}"


def test_a_streamed_answer_has_anthropics_events_in_order() -> None:
    events = message_events(post("/v1/messages", body(stream=True))[0].content)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_at_its_limit_says_so(stream: bool) -> None:
    response, _ = post("/v1/messages", body(stream=stream), scripted("Hello", finish=Finish.LENGTH))
    ended = message_events(response.content)[-2]["delta"] if stream else response.json()
    assert ended["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "reason"), [(Finish.STOP, "stop_sequence"), (Finish.LENGTH, "max_tokens")]
)
def test_the_stop_sequence_that_ended_an_answer_is_named(stream: bool, finish: Finish, reason: str) -> None:
    stop = "END" if finish is Finish.STOP else ""
    ending = Delta(0, "", 3, finish=finish, stop_sequence=stop)
    answer = play(OPENING, Delta(0, "42", 2), ending, Usage(7, 3))
    response, _ = post("/v1/messages", body(stream=stream, stop_sequences=["END"]), answer)
    ended = message_events(response.content)[-2]["delta"] if stream else response.json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, stop or None)


CALLS = (
    OPENING,
    Delta(0, "Let me see.", 3, tool_calls=(ToolCall(0, "call_1", "add", '{"a"'),)),
    Delta(0, "", 5, tool_calls=(ToolCall(0, arguments=": 1}"), ToolCall(1, "call_2", "add"))),
    Delta(0, "", 6, finish=Finish.TOOL_CALLS),
    Usage(7, 6),
)


def test_calls_are_blocks_of_their_own() -> None:
    response, _ = post("/v1/messages", body(tools=[ADD]), play(*CALLS))
    message = AnthropicMessage.model_validate(response.json(), strict=True)
    assert message.stop_reason == "tool_use"
    text, first, second = response.json()["content"]
    assert text["text"] == "Let me see."
    assert (first["id"], first["name"], first["input"]) == ("call_1", "add", {"a": 1})
    assert (second["id"], second["input"]) == ("call_2", {})


def test_reasoning_and_cached_tokens_are_told() -> None:
    answer = play(
        OPENING,
        Delta(0, "", 2, reasoning="Hm.", reasoning_tokens=2),
        Delta(0, "42", 3, finish=Finish.STOP, reasoning_tokens=2, cached_tokens=5),
        Usage(7, 3, cached_tokens=5, reasoning_tokens=2),
    )
    whole = post("/v1/messages", body(), answer)[0].json()
    message = AnthropicMessage.model_validate(whole, strict=True)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (2, 5)
    events = message_events(post("/v1/messages", body(stream=True), answer)[0].content)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "text_delta"]


def test_tokens_are_counted_without_max_tokens_and_with_the_same_errors() -> None:
    asked = {key: value for key, value in body().items() if key != "max_tokens"}
    path = "/v1/messages/count_tokens"
    begun = asked["messages"] + [{"role": "assistant", "content": "{"}]
    response, _ = post(path, asked)
    assert "can count the tokens" in error_of(response, 400)["message"]

    async def scenario(edge: Edge) -> None:
        edge.script.models = [replace(edge.script.models[0], features=frozenset({"chat", "count"}))]
        counted = await edge.post(path, asked)
        assert (counted.status_code, counted.json()) == (200, {"input_tokens": 7})
        client = anthropic.AsyncAnthropic(api_key=KEY, base_url="http://edge", http_client=edge.http)
        assert (await client.messages.count_tokens(**asked)).input_tokens == 7
        assert (await client.messages.count_tokens(**asked | {"messages": begun})).input_tokens == 7
        assert error_of(await edge.post(path, asked | {"messages": []}), 400)
        assert error_of(await edge.post(path, asked, authorization="Bearer no"), 401)
        assert error_of(await edge.post(path, asked | {"tools": [ADD]}), 400)

    async def count(query: Query) -> int:
        return 7

    run(scenario, count=count)


def test_anthropics_sdk_reads_whole_and_streamed_answers() -> None:
    seen: list[Any] = []

    async def scenario(edge: Edge) -> None:
        client = anthropic.AsyncAnthropic(api_key=KEY, base_url="http://edge", http_client=edge.http)
        asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        whole = await client.messages.create(**asked)
        seen.append(whole.content[0].to_dict()["text"])
        assert whole.id == f"msg_{whole._request_id}"
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked | {"messages": []})
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]
        async with client.messages.stream(**asked) as stream:
            seen.append(await stream.get_final_text())

    run(scenario)
    assert seen == ["Hello world", "Hello world"]


# ---- laws

texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Draw an answer: texts, then calls whose arguments are cut anywhere."""
    deltas = [Delta(0, "", 1, reasoning=text) for text in draw(texts)]
    deltas += [Delta(0, text, 1) for text in draw(texts)]
    for index in range(draw(st.integers(0, 3))):
        arguments = json.dumps(draw(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)))
        cut = draw(st.integers(0, len(arguments)))
        parts = [
            ToolCall(index, f"call_{index}", "add", arguments[:cut]),
            ToolCall(index, "", "", arguments[cut:]),
        ]
        deltas += [Delta(0, "", 1, tool_calls=(part,)) for part in parts]
    return [OPENING, *deltas, Delta(0, "", 1, finish=draw(st.sampled_from(Finish))), Usage(7, len(deltas))]


def test_text_that_comes_with_the_end_of_a_call_follows_it() -> None:
    pieces: list[AnswerEvent] = [
        OPENING,
        Delta(0, "", 1, tool_calls=(ToolCall(0, "call_1", "add", '{"a":'),)),
        Delta(0, "Done.", 4, tool_calls=(ToolCall(0, arguments="1}"), ToolCall(1, "call_2", "add", "{}"))),
        Delta(0, "", 5, finish=Finish.TOOL_CALLS),
        Usage(7, 5),
    ]
    events = message_events(b"".join(map(MessageEncoder(HEAD).encode, pieces)))
    blocks = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
    assert blocks == ["tool_use", "text", "tool_use"]


@given(answers())
def test_the_events_of_a_stream_join_to_the_whole_answer(pieces: list[AnswerEvent]) -> None:
    encoder = MessageEncoder(HEAD)
    events = message_events(b"".join(encoder.encode(piece) for piece in pieces))
    assert encoder.complete
    choice = Choice()
    for piece in pieces:
        if isinstance(piece, Delta):
            choice.add(piece)
    assert isinstance(pieces[0], Opening)
    assert isinstance(pieces[-1], Usage)
    whole = json.loads(message_body(HEAD, UnaryResponse(pieces[0], [choice], pieces[-1])))
    assert len(whole["content"]) == sum(event["type"] == "content_block_start" for event in events)
    for index, block in enumerate(whole["content"]):
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
        if block["type"] in ("text", "thinking"):
            field = block["type"]
            assert "".join(delta[field] for delta in deltas) == block[field]
        else:
            assert json.loads("".join(delta["partial_json"] for delta in deltas) or "{}") == block["input"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"] == whole["usage"]
