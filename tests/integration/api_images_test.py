"""The API's promises about images: three formats that mean the same, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gateway.domain import Model, Query
from gateway.openai.fields import MAX_IMAGES
from gateway.prompt import Chat, Message
from tests.support.fakes.edge import MODEL, Edge, chat_body, error_of, post, run
from tests.support.server_abilities import RED, data_url, png

PNG = png(56, 84, RED)
URL = data_url(PNG)
SEEING = (Model(MODEL, "rev-1", 1024, 0, "mico", frozenset({"chat", "vision"})),)
FETCHING = (Model(MODEL, "rev-1", 1024, 0, "mico", frozenset({"chat", "vision", "image_urls"})),)
SHOWN = {"type": "image_url", "image_url": {"url": URL}}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat_body(messages=[user(*parts)])


def response(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": MODEL, "input": [user(*parts)]}


def message(*parts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": [user(*parts)]}


def asked(request: tuple[str, dict[str, Any]], models: tuple[Model, ...] = SEEING) -> Query:
    response, script = post(*request, models=lambda: models)
    assert response.status_code == 200, response.text
    return script.query


def turns(query: Query) -> tuple[Message, ...]:
    assert isinstance(query.prompt, Chat)
    return query.prompt.messages


@pytest.mark.parametrize(
    "request_",
    [
        chat({"type": "text", "text": "What "}, SHOWN, {"type": "text", "text": "is it?"}),
        response(
            {"type": "input_text", "text": "What "},
            {"type": "input_image", "image_url": URL},
            {"type": "input_text", "text": "is it?"},
        ),
        message({"type": "text", "text": "What "}, BLOCK, {"type": "text", "text": "is it?"}),
    ],
)
def test_an_image_of_each_format_reaches_the_site_as_it_came(request_: tuple[str, dict[str, Any]]) -> None:
    query = asked(request_)
    (turn,) = turns(query)
    assert turn.content == query.text
    assert turn.content.replace("\n", "") == "What is it?"  # blocks of messages are lines of their own
    assert turn.images is not None
    parts = json.loads(turn.images.content_json)
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    assert parts[1] == SHOWN
    assert query.needs == {"vision"}


def test_images_count_as_tokens_before_a_site_has_counted() -> None:
    text = {"type": "text", "text": "What is it?"}
    without = asked(chat(text)).prompt_tokens_guess
    assert asked(chat(text, SHOWN)).prompt_tokens_guess == without + 64
    big = {"type": "image_url", "image_url": {"url": data_url(png(560, 560))}}
    assert asked(chat(text, SHOWN, big)).prompt_tokens_guess == without + 64 + 400


def test_a_function_may_return_an_image() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": [SHOWN]},
    ]
    query = asked(("/v1/chat/completions", chat_body(messages=messages)))
    assert turns(query)[-1].images is not None
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "png"}, BLOCK]}
    query = asked(message(result))
    (turn,) = turns(query)
    assert (turn.role, turn.content, turn.tool_call_id) == ("tool", "png", "c")
    assert turn.images is not None
    assert json.loads(turn.images.content_json)[1] == SHOWN
    output = {"type": "function_call_output", "call_id": "c"}
    body = {"model": MODEL, "input": [output | {"output": [{"type": "input_image", "image_url": URL}]}]}
    assert asked(("/v1/responses", body)).needs == {"vision"}


def test_the_detail_of_an_image_is_passed_on() -> None:
    shown = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    (turn,) = turns(asked(chat(shown)))
    assert turn.images is not None
    assert json.loads(turn.images.content_json) == [shown]


@pytest.mark.parametrize("request_", [chat(SHOWN), message(BLOCK)])
def test_a_model_that_sees_nothing_is_named(request_: tuple[str, dict[str, Any]]) -> None:
    blind = (Model(MODEL, "rev-1", 1024, 0, "mico", frozenset({"chat"})),)
    found, script = post(*request_, models=lambda: blind)
    assert found.status_code == 400
    assert f"No site that serves {MODEL} can see images" in found.json()["error"]["message"]
    assert not script.queries


def test_an_address_needs_a_site_whose_server_may_fetch() -> None:
    shown = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    refused, script = post(*chat(shown), models=lambda: SEEING)
    error = error_of(refused, 400)
    assert (error["param"], error["code"]) == ("messages", "unsupported_parameter")
    assert "data URL" in error["message"]
    assert not script.queries
    assert asked(chat(shown), FETCHING).needs == {"vision", "image_urls"}
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    assert asked(message(block), FETCHING).needs == {"vision", "image_urls"}


@pytest.mark.parametrize(
    ("param", "request_"),
    [
        ("messages.0.content.0.image_url", chat({"type": "image_url"})),
        ("messages.0.content.0.image_url", chat({"type": "image_url", "image_url": URL})),
        ("messages.0.content.0.image_url.url", chat({"type": "image_url", "image_url": {}})),
        (
            "messages.0.content.0.image_url.url",
            chat({"type": "image_url", "image_url": {"url": data_url(b"x")}}),
        ),
        (
            "messages.0.content.0.image_url.url",
            chat({"type": "image_url", "image_url": {"url": "file:///x"}}),
        ),
        (
            "messages.0.content.0.image_url.detail",
            chat({"type": "image_url", "image_url": {"url": URL, "detail": "much"}}),
        ),
        ("input.0.content.0.file_id", response({"type": "input_image", "file_id": "file-1"})),
        ("input.0.content.0.image_url", response({"type": "input_image", "image_url": {"url": URL}})),
        ("input.0.content.0.image_url", response({"type": "input_image", "image_url": "ftp://x"})),
        ("input.0.content.0.type", response({"type": "input_file", "file_id": "file-1"})),
    ],
)
def test_a_broken_image_is_refused_by_its_field(param: str, request_: tuple[str, dict[str, Any]]) -> None:
    found, script = post(*request_, models=lambda: FETCHING)
    assert error_of(found, 400)["param"] == param
    assert not script.queries


@pytest.mark.parametrize(
    ("param", "source"),
    [
        ("source.type", {"type": "file", "file_id": "f"}),
        ("source.media_type", {"type": "base64", "data": "x"}),
        ("source.data", {"type": "base64", "media_type": "image/png"}),
        ("source.data", {"type": "base64", "media_type": "image/png", "data": "eA=="}),
        ("source.data", {"type": "base64", "media_type": "image/bmp", "data": "eA=="}),
        ("source.url", {"type": "url"}),
    ],
)
def test_a_broken_image_block_is_refused_by_its_field(param: str, source: dict[str, Any]) -> None:
    found, script = post(*message({"type": "image", "source": source}), models=lambda: FETCHING)
    assert found.status_code == 400
    assert f"'messages.0.content.0.{param}'" in found.json()["error"]["message"]
    assert not script.queries


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_a_user_or_a_function_shows_images(role: str) -> None:
    body = chat_body(messages=[{"role": role, "content": [SHOWN]}])
    found, _ = post("/v1/chat/completions", body, models=lambda: SEEING)
    assert error_of(found, 400)["param"] == "messages.0.content.0.type"


def test_images_are_counted_over_all_messages() -> None:
    many = chat_body(messages=[user(*[SHOWN] * (MAX_IMAGES // 2))] * 2)
    assert post("/v1/chat/completions", many, models=lambda: SEEING)[0].status_code == 200
    many["messages"] = [*many["messages"], user(SHOWN)]
    found, script = post("/v1/chat/completions", many, models=lambda: SEEING)
    error = error_of(found, 400)
    assert error["param"] == "messages.2.content.0.image_url.url"
    assert f"the {MAX_IMAGES} images" in error["message"]
    assert not script.queries


def test_the_openai_sdk_sends_images() -> None:
    async def scenario(edge: Edge) -> None:
        shown: Any = {"type": "image_url", "image_url": {"url": URL}}
        await edge.sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [shown]}])
        shown = {"type": "input_image", "image_url": URL, "detail": "auto"}
        await edge.sdk.responses.create(model=MODEL, input=[{"role": "user", "content": [shown]}])

    script = run(scenario, models=lambda: SEEING)
    assert [query.needs for query in script.queries] == [{"vision"}] * 2
