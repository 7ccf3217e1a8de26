"""What POST /v1/responses refuses, and by which field it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import BadRequest
from tests.support.fakes.edge import MODEL, MODELS, NESTED, error_of, fail, post

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edits files"}
SEARCH = {"type": "web_search"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hi"} | fields


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": None}),
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": 3}),
        ("input.0", {"input": ["x"]}),
        ("input.0.type", {"input": [{}]}),
        ("input.0.type", {"input": [{"type": "", "role": "user", "content": "x"}]}),
        ("input.0.content", {"input": [{"type": "reasoning", "content": {}}]}),
        ("input.0.type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input.0.role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input.0.content", {"input": [{"role": "user"}]}),
        ("input.0.content.0.image_url", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input.0.call_id", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        ("input.0.output", {"input": [{"type": "function_call_output", "call_id": "a"}]}),
        ("instructions", {"instructions": 3}),
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("moderation", {"moderation": {"model": "omni-moderation-latest"}}),
        ("truncation", {"truncation": "auto"}),
        ("tools.0.type", {"tools": [{"type": "file_search"}]}),
        ("tools.0.name", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [ADD, ADD]}),
        ("tools.0.format.type", {"tools": [PATCH | {"format": {"type": "json"}}]}),
        ("tools.0.format.syntax", {"tools": [PATCH | {"format": GRAMMAR | {"syntax": "ebnf"}}]}),
        ("tools.0.format.definition", {"tools": [PATCH | {"format": GRAMMAR | {"definition": ""}}]}),
        ("tools.0.tools", {"tools": [{"type": "namespace", "name": "n", "description": "d"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.type", {"tools": [SEARCH], "tool_choice": SEARCH}),
        ("tool_choice.name", {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}),
        ("tool_choice.tools", {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": []}}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        ("reasoning.effort", {"reasoning": {"effort": "enormous"}}),
        ("reasoning.summary", {"reasoning": {"summary": "long"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("metadata.a", {"metadata": {"a": 1}}),
        ("metadata", {"metadata": {str(number): "x" for number in range(17)}}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    response, script = post("/v1/responses", body(**fields))
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["message"].count(f"'{param}'") == 1
    assert not script.queries


def test_a_call_that_is_required_of_tools_that_run_nowhere_is_refused_as_such() -> None:
    response, _ = post("/v1/responses", body(tools=[SEARCH], tool_choice="required"))
    assert "none of 'tools' can be called here" in error_of(response, 400)["message"]


def test_an_input_that_fits_no_context_names_its_field() -> None:
    models = [replace(model, max_prompt_chars=16_384) for model in MODELS]
    response, script = post("/v1/responses", body(input="word " * 6000), models=lambda: models)
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert not script.queries


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("text.format", {"text": {"format": {"type": "json_object"}}}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("include", {"include": ["message.output_text.logprobs"]}),
    ],
)
def test_what_a_model_lacks_is_told_by_the_field_that_asks_for_it(param: str, fields: dict[str, Any]) -> None:
    response, script = post("/v1/responses", body(model=NESTED, **fields))
    error = error_of(response, 400)
    assert error["param"] == param
    assert f"leave '{param}' out" in error["message"]
    assert not script.queries


@pytest.mark.parametrize(
    ("told", "param"),
    [("messages", "input"), ("response_format", "text.format"), ("tools", "tools"), (None, None)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_site_refuses_is_told_by_the_field_of_the_request(
    told: str | None, param: str | None, stream: bool
) -> None:
    response, _ = post("/v1/responses", body(stream=stream), fail(BadRequest("no", param=told)))
    assert error_of(response, 400)["param"] == param
