"""The command line's HTTP client against answers as a gateway gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mico.client import Client
from mico.commands.chat import relay, response_format
from mico.errors import CommandFailed, ExitCode
from mico.sse import data_events, lines


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1)),
    st.integers(1, 9),
)
def test_every_event_comes_out_as_it_went_in_however_it_was_cut(payloads: list[str], size: int) -> None:
    sent = "".join(f": keep-alive\n\ndata: {payload}\n\n" for payload in payloads).encode()
    parts = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert list(data_events(lines(parts))) == payloads


def test_data_lines_of_one_event_are_joined_and_the_last_needs_no_empty_line() -> None:
    assert list(data_events(["data: a", "data:b", "", "id: 3", "data: c"])) == ["a\nb", "c"]


def client(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://gateway/v1", "key", transport=httpx.MockTransport(answer))


def chunk(text: str = "", **more: object) -> str:
    choices = [{"index": 0, "delta": {"content": text}}] if text else []
    return f"data: {json.dumps({'choices': choices, **more})}\n\n"


def streams(*parts: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, headers={"x-mico-site": "aws"}, text="".join(parts))


def test_an_answer_is_written_as_it_comes_and_returned_with_its_figures() -> None:
    usage = {"usage": {"completion_tokens": 2}}
    written: list[str] = []
    gateway = client(streams(chunk("Hel"), chunk("lo"), chunk(**usage), "data: [DONE]\n\n"))
    answer = relay(gateway, "m", [{"role": "user", "content": "?"}], {}, written.append)
    assert written == ["Hel", "lo"]
    assert (answer.text, answer.site, answer.completion_tokens) == ("Hello", "aws", 2)
    assert answer.first_token_s is not None
    assert "site aws" in answer.stats()


def test_a_line_ends_only_where_the_protocol_says_so() -> None:
    """U+2028 and its like stand in JSON as they are, and Python ends lines at them."""
    text = "one\u2028two\u2029three\x85four"
    body = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False)
    gateway = client(streams(f"data: {body}\r\n\r\n", "data: [DONE]\n\n"))
    assert relay(gateway, "m", [], {}, lambda _: None).text == text


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        (
            (chunk("Hel"), 'data: {"error": {"message": "the site was lost"}}\n\n', "data: [DONE]\n\n"),
            "was lost",
        ),
        ((chunk("Hel"),), "without [DONE]"),
    ],
)
def test_a_broken_stream_is_a_failure_and_not_a_short_answer(parts: tuple[str, ...], cause: str) -> None:
    with pytest.raises(CommandFailed) as failure:
        relay(client(streams(*parts)), "m", [], {}, lambda _: None)
    assert cause in failure.value.cause


def test_the_request_carries_the_key_and_asks_for_usage() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, text="data: [DONE]\n\n")

    list(client(answer).chat("m", [], temperature=0))
    (request,) = seen
    assert request.url == "http://gateway/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer key"
    sent = json.loads(request.content)
    assert (sent["stream"], sent["stream_options"], sent["temperature"]) == (True, {"include_usage": True}, 0)


@pytest.mark.parametrize(
    ("status", "code"), [(401, ExitCode.NOT_AUTHENTICATED), (404, ExitCode.FAILED), (503, ExitCode.FAILED)]
)
def test_a_refusal_is_told_in_the_gateways_own_words(status: int, code: ExitCode) -> None:
    gateway = client(lambda _: httpx.Response(status, json={"error": {"message": "because"}}))
    for call in (lambda: gateway.get("/v1/models"), lambda: list(gateway.chat("m", []))):
        with pytest.raises(CommandFailed) as failure:
            call()
        assert (failure.value.cause, failure.value.exit_code) == ("because", code)


def test_a_refusal_that_is_not_json_is_still_told() -> None:
    gateway = client(lambda _: httpx.Response(502, text="<html>bad gateway"))
    with pytest.raises(CommandFailed, match="502") as failure:
        gateway.get("/v1/models")
    assert failure.value.cause == "<html>bad gateway"


def test_no_gateway_is_a_failure_with_a_tip() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(CommandFailed) as failure:
        client(refuse).get("/v1/models")
    assert "mico up" in failure.value.tip


def test_a_schema_file_becomes_a_format_and_a_broken_one_a_reason(tmp_path: Path) -> None:
    good, broken = tmp_path / "good.json", tmp_path / "broken.json"
    good.write_text('{"type": "integer"}')
    broken.write_text("{")
    asked = {"name": "answer", "schema": {"type": "integer"}, "strict": True}
    assert response_format(good) == {"type": "json_schema", "json_schema": asked}
    with pytest.raises(CommandFailed, match="holds no JSON"):
        response_format(broken)
