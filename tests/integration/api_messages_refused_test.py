"""What POST /v1/messages refuses, and how its errors look to Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest

from gateway.domain import Delta
from gateway.errors import NoSite, UpstreamLost
from tests.support.anthropic_requests import ADD, body, error_of
from tests.support.event_streams import message_events
from tests.support.fakes.edge import KEY, NESTED, OPENING, Edge, fail, post, run

CALL = {"type": "tool_use", "id": "a", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": None}),
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [*body()["messages"], {"role": "assistant", "content": "{"}]}),
        ("messages.0.role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages.0.content", {"messages": [{"role": "user"}]}),
        ("messages.0.content.0.source", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}),
        (
            "messages.0.content.0.thinking",
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": None}]}]},
        ),
        (
            "messages.0.content.0.input",
            {"messages": [{"role": "assistant", "content": [CALL | {"input": [1]}]}]},
        ),
        ("system.0.type", {"system": [{"type": "image"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
        ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice.name", {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("stop_sequences.0", {"stop_sequences": [""]}),
        ("stop_sequences.1", {"stop_sequences": ["a", "b" * 100_000]}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
        ("output_format.type", {"output_format": {"type": "xml"}}),
        ("container", {"container": "c"}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    response, script = post("/v1/messages", body(**fields))
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert f"'{param}'" in error["message"]
    assert not script.queries


def test_a_turn_that_cannot_be_read_is_no_end_with_the_assistant() -> None:
    turns = [*body()["messages"], {"role": "assistant", "content": "{"}, {"role": "user", "content": 1}]
    response, _ = post("/v1/messages", body(messages=turns))
    message = error_of(response, 400)["message"]
    assert "'messages.2.content'" in message
    assert "must end with" not in message


@pytest.mark.parametrize("name", ["output_config.format", "output_format"])
def test_a_model_that_keeps_to_no_schema_is_told_by_the_field_that_asks_for_it(name: str) -> None:
    form: Any = {"type": "json_schema", "schema": {"type": "object"}}
    asked = {"output_format": form} if name == "output_format" else {"output_config": {"format": form}}
    response, _ = post("/v1/messages", body(model=NESTED, **asked))
    assert f"leave '{name}' out" in error_of(response, 400)["message"]


def test_errors_have_anthropics_shape_and_status() -> None:
    wrong_key: list[httpx2.Response] = []

    async def scenario(edge: Edge) -> None:
        wrong_key.append(await edge.post("/v1/messages", body(), authorization="Bearer wrong"))

    run(scenario)
    assert error_of(wrong_key[0], 401)["type"] == "authentication_error"
    no_room = post("/v1/messages", body(), fail(NoSite("no site now")))[0]
    assert error_of(no_room, 529)["type"] == "overloaded_error"
    assert no_room.headers["retry-after"] == "2"
    lost = post("/v1/messages", body(stream=True), fail(UpstreamLost("the site was lost")))[0]
    assert error_of(lost, 502)["type"] == "api_error"


def test_anthropics_sdk_knows_errors_of_other_paths_by_their_type() -> None:
    async def scenario(edge: Edge) -> None:
        client = anthropic.AsyncAnthropic(api_key=KEY, base_url="http://edge", http_client=edge.http)
        for asked in (client.models.retrieve("none"), client.beta.skills.list()):
            with pytest.raises(anthropic.NotFoundError) as refused:
                await asked
            assert refused.value.type == "not_found_error"
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.models.list(extra_headers={"authorization": "Bearer wrong"})
        assert unknown.value.type == "authentication_error"

    run(scenario)


def test_a_failure_in_the_stream_is_its_last_event() -> None:
    answer = fail(UpstreamLost("the site was lost"), after=(OPENING, Delta(0, "Hel", 1)))
    last = message_events(post("/v1/messages", body(stream=True), answer)[0].content)[-1]
    assert (last["type"], last["error"]["message"]) == ("error", "the site was lost")


def test_the_key_may_come_as_x_api_key() -> None:
    async def scenario(edge: Edge) -> None:
        edge.http.headers.pop("authorization")
        assert (await edge.post("/v1/messages", body())).status_code == 401
        assert (await edge.post("/v1/messages", body(), x_api_key="wrong")).status_code == 401
        assert (await edge.post("/v1/messages", body(), x_api_key=KEY)).status_code == 200

    run(scenario)
