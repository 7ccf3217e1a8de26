"""The API's promises about functions that a model may call and formats that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.domain import Delta, Finish, Sampling, ToolCall, Usage
from gateway.openai.sampling import MODEL_DEFAULTS
from gateway.prompt import Chat
from tests.support.fakes.edge import (
    MODEL,
    NESTED,
    OPENING,
    Edge,
    chat,
    chat_body,
    error_of,
    play,
    post,
    refused,
    run,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
NOT_THERE = {"type": "function", "function": {"name": "sub"}}
NOW = {"type": "function", "function": {"name": "now"}}
PATCH_NAME = {"type": "custom", "custom": {"name": "patch"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "edits files"}}
PATCH_FUNCTION = {
    "name": "patch",
    "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    "description": "edits files",
}
GRAMMAR: dict[str, Any] = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": PATCH["custom"] | fields}


def grammar(**fields: Any) -> dict[str, Any]:
    return GRAMMAR | {"grammar": GRAMMAR["grammar"] | fields}


def allowed(*tools: dict[str, Any], mode: object = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def prompt(**fields: Any) -> Chat:
    response, script = chat(**fields)
    assert response.status_code == 200, response.text
    assert isinstance(script.query.prompt, Chat)
    return script.query.prompt


@pytest.mark.parametrize(
    ("fields", "choice", "name"),
    [
        ({}, "auto", ""),
        ({"tool_choice": "auto"}, "auto", ""),
        ({"tool_choice": "required"}, "required", ""),
        ({"tool_choice": NAMED}, "named", "add"),
    ],
)
def test_tools_reach_the_site(fields: dict[str, Any], choice: str, name: str) -> None:
    asked = prompt(tools=[ADD], **fields)
    assert json.loads(asked.tools_json) == [ADD]
    assert (asked.tool_choice, asked.tool_name, asked.single_tool_call) == (choice, name, False)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_reach_the_site(mode: str) -> None:
    asked = prompt(tools=[ADD, NOW, PATCH], tool_choice=allowed(NAMED, PATCH_NAME, mode=mode))
    assert [each["function"]["name"] for each in json.loads(asked.tools_json)] == ["add", "patch"]
    assert asked.tool_choice == mode


def test_a_custom_tool_reaches_the_site_as_a_function_of_one_text() -> None:
    asked = prompt(tools=[PATCH], tool_choice=PATCH_NAME)
    assert json.loads(asked.tools_json) == [{"type": "function", "function": PATCH_FUNCTION}]
    assert (asked.tool_choice, asked.tool_name) == ("named", "patch")
    [told] = json.loads(prompt(tools=[custom(format=GRAMMAR)]).tools_json)
    assert told["function"]["description"].endswith("follows this grammar:\nstart: /a+/")


def test_an_agent_may_offer_hundreds_of_tools() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{number}"}} for number in range(500)]
    assert len(json.loads(prompt(tools=tools).tools_json)) == 500


def test_tool_choice_none_sends_no_tools() -> None:
    assert prompt(tools=[ADD], tool_choice="none").tools_json == ""
    assert prompt(tool_choice="none").tools_json == ""
    assert prompt(tools=None, tool_choice=None).tools_json == ""


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": []}),
        ("tools", {"tools": [ADD] * 2}),
        ("tools", {"tools": [ADD] * 1025}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
        ("tools.0.custom", {"tools": [{"type": "custom"}]}),
        ("tools.0.custom.name", {"tools": [{"type": "custom", "custom": {"name": "a b"}}]}),
        ("tools", {"tools": [ADD, {"type": "custom", "custom": {"name": "add"}}]}),
        (
            "tools.0.custom.format.grammar",
            {"tools": [custom(format={"type": "grammar"})]},
        ),
        ("tools.0.custom.format.type", {"tools": [custom(format={"type": "json"})]}),
        ("tools.0.custom.format.grammar.syntax", {"tools": [custom(format=grammar(syntax={}))]}),
        ("tools.0.custom.format.grammar.definition", {"tools": [custom(format=grammar(definition=None))]}),
        ("tools.0.function", {"tools": [{"type": "function"}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
        (
            "tools.0.function.parameters",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        ),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice", {"tool_choice": NAMED}),
        ("tool_choice", {"tools": [ADD], "tool_choice": "perhaps"}),
        ("tool_choice", {"tools": [ADD], "tool_choice": 1}),
        ("tool_choice.type", {"tools": [ADD], "tool_choice": {"type": "some_tools"}}),
        (
            "tool_choice.custom.name",
            {"tools": [ADD], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        ),
        ("tool_choice.allowed_tools", {"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.allowed_tools.mode", {"tools": [ADD], "tool_choice": allowed(NAMED, mode="must")}),
        ("tool_choice.allowed_tools.mode", {"tools": [ADD], "tool_choice": allowed(NAMED, mode={})}),
        ("tool_choice.allowed_tools.tools", {"tools": [ADD], "tool_choice": allowed()}),
        (
            "tool_choice.allowed_tools.tools.0.function.name",
            {"tools": [ADD], "tool_choice": allowed(NOT_THERE)},
        ),
        ("tool_choice.function.name", {"tools": [ADD], "tool_choice": NOT_THERE}),
        ("function_call", {"function_call": "auto"}),
    ],
)
def test_malformed_tools_are_refused(param: str, fields: dict[str, Any]) -> None:
    refused(param, **fields)


def test_a_model_without_tools_is_named_with_an_alternative() -> None:
    response, script = post("/v1/chat/completions", chat_body(model=NESTED, tools=[ADD]))
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert NESTED in error["message"]
    assert "tool_choice" in error["message"]
    assert not script.queries
    assert chat(model=NESTED, tools=[ADD], tool_choice="none")[0].status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, {}),
    ],
)
def test_a_response_format_reaches_the_site_as_a_schema(response_format: Any, schema: Any) -> None:
    _, script = chat(response_format=response_format)
    assert json.loads(script.query.sampling.guided_json) == schema


@pytest.mark.parametrize(
    ("param", "response_format"),
    [
        ("response_format", "json_object"),
        ("response_format.type", {"type": "grammar"}),
        ("response_format.type", {"type": None}),
        ("response_format.type", {}),
        ("response_format.json_schema", {"type": "json_schema"}),
        ("response_format.json_schema", {"type": "json_schema", "json_schema": "x"}),
        ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"name": "a b"}}),
        (
            "response_format.json_schema.schema",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": [1]}},
        ),
    ],
)
def test_a_response_format_that_cannot_be_enforced_is_refused(param: str, response_format: Any) -> None:
    refused(param, response_format=response_format)


def test_a_model_without_structured_output_is_named() -> None:
    response, script = chat(model=NESTED, response_format={"type": "json_object"})
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
    assert not script.queries


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body(model=NESTED, logprobs=True)),
        ("/v1/completions", {"model": NESTED, "prompt": "x", "logprobs": 1}),
    ],
)
def test_a_model_without_logprobs_is_named(path: str, body: dict[str, Any]) -> None:
    response, script = post(path, body)
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")
    assert NESTED in error["message"]
    assert not script.queries


def test_parallel_tool_calls_false_allows_one_call() -> None:
    assert prompt(tools=[ADD], parallel_tool_calls=False).single_tool_call
    assert not prompt(tools=[ADD], parallel_tool_calls=True).single_tool_call
    assert chat(parallel_tool_calls=False)[1].query.sampling == Sampling(left_out=MODEL_DEFAULTS)


CALLS = play(
    OPENING,
    Delta(0, "Let me ", 1),
    Delta(0, "see.", 3, tool_calls=(ToolCall(0, "call_1", "add", '{"a"'),)),
    Delta(0, "", 5, tool_calls=(ToolCall(0, arguments=": 1}"), ToolCall(1, "call_2", "add"))),
    Delta(0, "", 6, tool_calls=(ToolCall(1, arguments="{}"),), finish=Finish.TOOL_CALLS),
    Usage(7, 6),
)


def test_tool_calls_have_openais_shape() -> None:
    response, _ = chat(CALLS, tools=[ADD])
    completion = ChatCompletion.model_validate(response.json(), strict=True)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    assert response.json()["choices"][0]["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]


def test_an_answer_of_calls_alone_has_null_content() -> None:
    only = play(
        OPENING,
        Delta(0, "", 1, finish=Finish.TOOL_CALLS, tool_calls=(ToolCall(0, "c", "add", "{}"),)),
        Usage(7, 1),
    )
    message = chat(only, tools=[ADD])[0].json()["choices"][0]["message"]
    assert message["content"] is None
    assert "tool_calls" not in chat()[0].json()["choices"][0]["message"]


def test_streamed_tool_calls_have_openais_shape() -> None:
    response, _ = chat(CALLS, tools=[ADD], stream=True)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    for event in events:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert [news for delta in deltas for news in delta.get("tool_calls", [])] == [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a"'},
        },
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "tool_calls"


def test_the_sdk_joins_a_streamed_call() -> None:
    joined: list[Sequence[Any]] = []

    async def scenario(edge: Edge) -> None:
        asked = chat_body(tools=[ADD], model=MODEL)
        async with edge.sdk.chat.completions.stream(**asked) as stream:
            completion = await stream.get_final_completion()
        joined.append(completion.choices[0].message.tool_calls or ())

    run(scenario, CALLS)
    assert [(call.id, call.function.arguments) for call in joined[0]] == [
        ("call_1", '{"a": 1}'),
        ("call_2", "{}"),
    ]


CUSTOM_CALLS = play(
    OPENING,
    Delta(0, "", 1, tool_calls=(ToolCall(0, "call_1", "patch", '{"inp'),)),
    Delta(0, "", 2, tool_calls=(ToolCall(0, arguments='ut": "a\\n'), ToolCall(1, "call_2", "add", "{}"))),
    Delta(0, "", 3, tool_calls=(ToolCall(0, arguments='b"}'),), finish=Finish.TOOL_CALLS),
    Usage(7, 3),
)


def test_a_call_of_a_custom_tool_has_its_input() -> None:
    response, _ = chat(CUSTOM_CALLS, tools=[ADD, PATCH])
    ChatCompletion.model_validate(response.json(), strict=True)
    assert response.json()["choices"][0]["message"]["tool_calls"] == [
        {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}},
        {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]


def test_a_streamed_call_of_a_custom_tool_has_its_input_before_the_finish() -> None:
    response, _ = chat(CUSTOM_CALLS, tools=[ADD, PATCH], stream=True)
    choices = [
        json.loads(line[6:])["choices"][0]
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    assert [news for choice in choices for news in choice["delta"].get("tool_calls", [])] == [
        {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
        {"index": 0, "custom": {"input": "a\nb"}},
    ]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_the_verbosity_of_an_answer_is_refused_by_name() -> None:
    refused("verbosity", verbosity="low")
