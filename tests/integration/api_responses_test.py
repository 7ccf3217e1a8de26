"""The API's promises about POST /v1/responses: what a request means as a chat, whole and streamed answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from gateway.domain import AnswerEvent, Delta, Finish, Opening, TokenLogprob, ToolCall, Usage
from gateway.errors import UpstreamLost
from gateway.openai.fields import Fields, Problems
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_body import response_body
from gateway.openai.responses_request import read_response
from gateway.openai.responses_stream import ResponseEncoder
from gateway.openai.unary_response import Choice, UnaryResponse
from gateway.prompt import Chat, Message
from tests.support.event_streams import response_events
from tests.support.fakes.edge import (
    MODEL,
    OPENING,
    Edge,
    error_of,
    fail,
    play,
    post,
    run,
    scripted,
)

HEAD = ResponseHead("resp_q1", 1_750_000_000, MODEL, "rev-1", lambda: 1_750_000_002.5)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edits files"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi"} | fields


def read(**fields: Any) -> GenerationRequest:
    problems = Problems()
    request = read_response(Fields(body(**fields), problems))
    problems.raise_any()
    return request


def chat_of(**fields: Any) -> Chat:
    (prompt,) = read(**fields).prompts
    assert isinstance(prompt, Chat)
    return prompt


# ---- reading


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "Hi"}, [Message("user", "Hi")]),
        ({"instructions": "Be brief."}, [Message("system", "Be brief."), Message("user", "Hi")]),
        ({"input": [{"role": "user", "content": "Hi"}]}, [Message("user", "Hi")]),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "phase": "final_answer",
                        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
                    },
                ]
            },
            [Message("developer", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello")],
        ),
    ],
)
def test_input_is_a_chat(fields: dict[str, Any], messages: list[Message]) -> None:
    assert list(chat_of(**fields).messages) == messages


def test_calls_that_follow_one_another_are_one_turn() -> None:
    chat = chat_of(
        input=[
            {"role": "user", "content": "1 + 2, 3 + 4"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "content": "",
                "summary": [{"type": "summary_text", "text": "Two sums."}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "Adding."}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x":1}'},
            {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "a", "output": "3"},
            {
                "type": "custom_tool_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "done"}],
            },
        ]
    )
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    turn = chat.messages[1]
    assert (turn.content, turn.reasoning) == ("Adding.", "Two sums.")
    assert json.loads(turn.tool_calls_json) == [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}},
        {
            "id": "b",
            "type": "function",
            "function": {"name": "apply_patch", "arguments": '{"input":"*** Begin"}'},
        },
    ]
    assert [(each.content, each.tool_call_id) for each in chat.messages[2:]] == [("3", "a"), ("done", "b")]


@pytest.mark.parametrize(
    ("fields", "names", "choice", "name"),
    [
        ({}, ["add", "apply_patch"], "auto", ""),
        ({"tool_choice": "required"}, ["add", "apply_patch"], "required", ""),
        ({"tool_choice": {"type": "function", "name": "add"}}, ["add", "apply_patch"], "named", "add"),
        (
            {"tool_choice": {"type": "custom", "name": "apply_patch"}},
            ["add", "apply_patch"],
            "named",
            "apply_patch",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "add"}],
                }
            },
            ["add"],
            "required",
            "",
        ),
    ],
)
def test_tools_reach_the_site(fields: dict[str, Any], names: list[str], choice: str, name: str) -> None:
    chat = chat_of(tools=[ADD, PATCH], **fields)
    assert [tool["function"]["name"] for tool in json.loads(chat.tools_json)] == names
    assert (chat.tool_choice, chat.tool_name) == (choice, name)
    assert chat_of(tools=[ADD], tool_choice="none").tools_json == ""


CRM = {"type": "namespace", "name": "crm", "description": "customers", "tools": [ADD, PATCH]}


def test_functions_of_a_namespace_are_known_by_both_names() -> None:
    chat = chat_of(
        tools=[ADD, CRM, {"type": "web_search"}, {"type": "web_search_2025_08_26"}],
        tool_choice={"type": "function", "name": "add", "namespace": "crm"},
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "a", "name": "add", "namespace": "crm", "arguments": "{}"},
            {
                "type": "custom_tool_call",
                "call_id": "b",
                "name": "apply_patch",
                "namespace": "crm",
                "input": "",
            },
        ],
    )
    names = [tool["function"]["name"] for tool in json.loads(chat.tools_json)]
    assert names == ["add", "crm__add", "crm__apply_patch"]
    assert (chat.tool_choice, chat.tool_name) == ("named", "crm__add")
    calls = [call["function"]["name"] for call in json.loads(chat.messages[-1].tool_calls_json)]
    assert calls == ["crm__add", "crm__apply_patch"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_into_a_namespace_name_it(stream: bool) -> None:
    answer = play(
        OPENING,
        Delta(0, "", 1, tool_calls=(ToolCall(0, "c1", "crm__add", "{}"),)),
        Delta(0, "", 2, tool_calls=(ToolCall(1, "c2", "crm__apply_patch", '{"input":"x"}'),)),
        Delta(0, "", 3, finish=Finish.TOOL_CALLS),
        Usage(7, 3),
    )
    response, _ = post("/v1/responses", body(tools=[CRM], stream=stream), answer)
    whole = response_events(response.content)[-1]["response"] if stream else response.json()
    call, custom = Response.model_validate(whole, strict=True).output
    assert (call.type, call.name, call.namespace) == ("function_call", "add", "crm")
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", "x")


def test_a_schema_and_limits_reach_the_site() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = read(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        max_output_tokens=20,
        temperature=0.5,
        top_p=0.9,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert json.loads(request.sampling.guided_json) == schema
    assert (request.sampling.max_tokens, request.limit_field) == (20, "max_output_tokens")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.logprobs) == (0.5, 0.9, 2)


# ---- answers


def test_a_whole_answer_has_openais_shape() -> None:
    response, script = post("/v1/responses", body(instructions="Be brief.", metadata={"a": "b"}))
    assert response.status_code == 200, response.text
    whole = Response.model_validate(response.json(), strict=True)
    assert (whole.status, whole.output_text, whole.model) == ("completed", "Hello world", MODEL)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (7, 2, 9)
    assert (whole.instructions, whole.metadata, whole.previous_response_id) == ("Be brief.", {"a": "b"}, None)
    assert whole.id == f"resp_{script.query.id}"
    assert response.headers["x-mico-site"] == "alpha"


def test_an_answer_at_its_limit_is_incomplete() -> None:
    answer = scripted("Hello", finish=Finish.LENGTH)
    whole = Response.model_validate(post("/v1/responses", body(), answer)[0].json())
    assert (whole.status, whole.output_text) == ("incomplete", "Hello")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    streamed = response_events(post("/v1/responses", body(stream=True), answer)[0].content)
    assert streamed[-1]["type"] == "response.incomplete"


def test_a_streamed_answer_has_openais_events_in_order() -> None:
    response, _ = post("/v1/responses", body(stream=True))
    events = response_events(response.content)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["usage"]["total_tokens"] == 9


CALLS = (
    OPENING,
    Delta(0, "Let me ", 1),
    Delta(0, "see.", 3, tool_calls=(ToolCall(0, "call_1", "add", '{"a"'),)),
    Delta(0, "", 5, tool_calls=(ToolCall(0, arguments=": 1}"), ToolCall(1, "call_2", "apply_patch"))),
    Delta(0, "", 6, tool_calls=(ToolCall(1, arguments='{"input": "*** Be'),)),
    Delta(0, "", 8, tool_calls=(ToolCall(1, arguments='gin"}'),), finish=Finish.TOOL_CALLS),
    Usage(7, 8),
)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_of_their_own(stream: bool) -> None:
    response, _ = post("/v1/responses", body(tools=[ADD, PATCH], stream=stream), play(*CALLS))
    whole = response_events(response.content)[-1]["response"] if stream else response.json()
    text, call, custom = Response.model_validate(whole).output
    assert (text.type, call.type, custom.type) == ("message", "function_call", "custom_tool_call")
    assert (call.call_id, call.name, call.arguments) == ("call_1", "add", '{"a": 1}')
    assert (custom.call_id, custom.name, custom.input) == ("call_2", "apply_patch", "*** Begin")
    assert whole["tools"][0]["strict"] is False


def test_reasoning_refusals_and_cached_tokens_are_told() -> None:
    answer = play(
        OPENING,
        Delta(0, "", 2, reasoning="Hm.", reasoning_tokens=2),
        Delta(0, "", 3, refusal="No.", finish=Finish.CONTENT_FILTER, reasoning_tokens=2, cached_tokens=5),
        Usage(7, 3, cached_tokens=5, reasoning_tokens=2),
    )
    for stream in (False, True):
        response, _ = post("/v1/responses", body(stream=stream), answer)
        body_json = response_events(response.content)[-1]["response"] if stream else response.json()
        whole = Response.model_validate(body_json, strict=True)
        reasoning, message = whole.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
        assert (message.type, message.content[0].refusal) == ("message", "No.")
        assert whole.incomplete_details.reason == "content_filter"
        assert whole.usage.input_tokens_details.cached_tokens == 5
        assert whole.usage.output_tokens_details.reasoning_tokens == 2


def test_log_probabilities_are_of_the_text() -> None:
    fields = body(include=["message.output_text.logprobs"], top_logprobs=1, stream=True)
    events = response_events(post("/v1/responses", fields)[0].content)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"][0]["token"] for event in deltas] == ["Hello", " world"]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [1, 1]


def test_a_failure_before_the_answer_has_its_status() -> None:
    response, _ = post("/v1/responses", body(stream=True), fail(UpstreamLost("the site was lost")))
    assert error_of(response, 502)["code"] == "upstream_lost"


def test_a_failure_in_the_stream_is_its_last_event() -> None:
    answer = fail(UpstreamLost("the site was lost"), after=(OPENING, Delta(0, "Hel", 1)))
    events = response_events(post("/v1/responses", body(stream=True), answer)[0].content)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the site was lost"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_the_sdk_reads_whole_streamed_and_parsed_answers() -> None:
    seen: list[Any] = []

    async def scenario(edge: Edge) -> None:
        seen.append((await edge.sdk.responses.create(model=MODEL, input="Hi")).output_text)
        async with edge.sdk.responses.stream(model=MODEL, input="Hi") as stream:
            final = await stream.get_final_response()
        seen.append(final.output_text)

    run(scenario)
    assert seen == ["Hello world", "Hello world"]


def test_paths_of_stored_responses_say_what_is_missing() -> None:
    async def scenario(edge: Edge) -> None:
        for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("GET", "resp_1/input_items")):
            error = error_of(await edge.http.request(method, f"/v1/responses/{path}"), 404)
            assert "no stored responses" in error["message"]
        assert "compaction" in error_of(await edge.post("/v1/responses/compact", {}), 404)["message"]

    run(scenario)


# ---- laws


texts = st.text(st.characters(codec="utf-8"), max_size=6)
words = st.lists(texts, max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Draw an answer: texts, then calls, each cut anywhere, as deltas."""
    deltas = [Delta(0, "", 1, reasoning=text) for text in draw(words)]
    deltas += [Delta(0, text, 1) for text in draw(words)]
    deltas += [Delta(0, "", 1, refusal=text) for text in draw(words)]
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(("add", "apply_patch")))
        parts = [ToolCall(index, f"call_{index}", name), *(ToolCall(index, arguments=a) for a in draw(words))]
        deltas += [Delta(0, "", 1, tool_calls=(part,)) for part in parts]
    finish = draw(st.sampled_from(Finish))
    return [OPENING, *deltas, Delta(0, "", 1, finish=finish), Usage(7, len(deltas))]


@given(answers())
def test_the_events_of_a_stream_join_to_the_whole_answer(pieces: list[AnswerEvent]) -> None:
    request = read(tools=[ADD, PATCH])
    encoder = ResponseEncoder(request, HEAD)
    events = response_events(b"".join(encoder.encode(piece) for piece in pieces))
    assert encoder.complete
    choice = Choice()
    for piece in pieces:
        if isinstance(piece, Delta):
            choice.add(piece)
    assert isinstance(pieces[0], Opening)
    assert isinstance(pieces[-1], Usage)
    whole = json.loads(response_body(request, HEAD, UnaryResponse(pieces[0], [choice], pieces[-1])))
    assert events[-1]["response"] == whole
    for index, item in enumerate(whole["output"]):
        deltas = [event for event in events if event.get("output_index") == index and "delta" in event]
        joined = "".join(event["delta"] for event in deltas)
        whole_text = item["content"][0] if "content" in item else item
        fields = ("text", "refusal", "arguments", "input")
        assert joined == next(whole_text[name] for name in fields if name in whole_text)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done[index] == item


def test_a_text_beside_logprobs_alone_is_not_lost() -> None:
    encoder = ResponseEncoder(read(), HEAD)
    held = TokenLogprob("é", b"\xc3", -1.0)
    first, last = Delta(0, "", 1, logprobs=(held,)), Delta(0, "é", 2, finish=Finish.STOP)
    frames = b"".join(encoder.encode(piece) for piece in (OPENING, first, last, Usage(7, 2)))
    deltas = [event for event in response_events(frames) if event["type"].endswith("text.delta")]
    assert [(event["delta"], len(event["logprobs"])) for event in deltas] == [("é", 1)]
