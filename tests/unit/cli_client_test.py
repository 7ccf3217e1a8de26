"""The command line's HTTP client against answers as a gateway gives them."""

from __future__ import annotations

import io
import json
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mico.client import Client
from mico.commands.chat import Answer, response_format, stream_answer
from mico.errors import CommandFailed, ExitCode, GatewayUnavailable
from mico.sse import data_events, lines
from mico.terminal import Terminal


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
    return lambda _: httpx.Response(
        200, headers={"x-mico-site": "aws", "x-request-id": "r1"}, text="".join(parts)
    )


def test_an_answer_is_written_as_it_comes_and_returned_with_its_figures() -> None:
    usage = {"usage": {"completion_tokens": 2}}
    written: list[str] = []
    gateway = client(streams(chunk("Hel"), chunk("lo"), chunk(**usage), "data: [DONE]\n\n"))
    answer = stream_answer(gateway, "m", [{"role": "user", "content": "?"}], {}, written.append)
    assert written == ["Hel", "lo"]
    assert (answer.text, answer.site, answer.completion_tokens) == ("Hello", "aws", 2)
    assert answer.first_token_s is not None
    assert answer.stats().endswith("site aws, request r1")


def test_reasoning_is_written_apart_and_goes_back_with_the_conversation() -> None:
    def thought(text: str) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'reasoning': text}}]})}\n\n"

    written: list[str] = []
    aside: list[str] = []
    gateway = client(streams(thought("Six "), thought("sevens."), chunk("42"), "data: [DONE]\n\n"))
    answer = stream_answer(gateway, "m", [], {}, written.append, write_reasoning=aside.append)
    assert (written, aside) == (["42"], ["Six ", "sevens.", "\n\n"])
    assert (answer.text, answer.reasoning) == ("42", "Six sevens.")
    assert answer.first_token_s is not None


@pytest.mark.parametrize(
    ("terminal", "quiet", "environ", "shown"),
    [
        (True, False, {}, "\x1b[2mhm\x1b[0m"),
        (True, False, {"NO_COLOR": "1"}, "hm"),
        (True, True, {}, ""),
        (False, False, {}, ""),
    ],
)
def test_an_aside_is_for_people_alone(
    terminal: bool, quiet: bool, environ: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for name, stream in (("stdout", out), ("stderr", err)):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, name, stream)
    Terminal(quiet=quiet).aside("hm")
    assert (out.getvalue(), err.getvalue()) == ("", shown)


def test_a_line_ends_only_where_the_protocol_says_so() -> None:
    """U+2028 and its like stand in JSON as they are, and Python ends lines at them."""
    text = "one\u2028two\u2029three\x85four"
    body = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False)
    gateway = client(streams(f"data: {body}\r\n\r\n", "data: [DONE]\n\n"))
    assert stream_answer(gateway, "m", [], {}, lambda _: None).text == text


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        (
            (chunk("Hel"), 'data: {"error": {"message": "the site was lost"}}\n\n', "data: [DONE]\n\n"),
            "was lost",
        ),
        ((chunk("Hel"), 'data: {"error": "the model was unloaded"}\n\n'), "the model was unloaded"),
        ((chunk("Hel"),), "without [DONE]"),
    ],
)
def test_a_broken_stream_is_a_failure_and_not_a_short_answer(parts: tuple[str, ...], cause: str) -> None:
    with pytest.raises(CommandFailed) as failure:
        stream_answer(client(streams(*parts)), "m", [], {}, lambda _: None)
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
    gateway = client(lambda _: httpx.Response(502, text="<html>\n<b>\tbad gateway"))
    with pytest.raises(CommandFailed, match="502") as failure:
        gateway.get("/v1/models")
    assert failure.value.cause == "<html> <b> bad gateway"


def test_no_gateway_is_a_failure_with_a_tip() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(CommandFailed) as failure:
        client(refuse).get("/v1/models")
    assert "mico up" in failure.value.tip


def test_an_authority_that_is_not_trusted_is_told_with_what_trusts_it() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", request=request)

    with pytest.raises(GatewayUnavailable) as failure:
        client(refuse).get("/v1/models")
    assert failure.value.tip.startswith("SSL_CERT_FILE=FILE")


def test_a_schema_file_becomes_a_format_and_a_broken_one_a_reason(tmp_path: Path) -> None:
    good, broken = tmp_path / "good.json", tmp_path / "broken.json"
    good.write_text('{"type": "integer"}')
    broken.write_text("{")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    asked = {"name": "answer", "schema": {"type": "integer"}, "strict": True}
    assert response_format(good) == {"type": "json_schema", "json_schema": asked}
    for file in (broken, deep):
        with pytest.raises(CommandFailed, match="holds no JSON"):
            response_format(file)


def test_an_address_with_or_without_its_end_is_the_same() -> None:
    """`mico models` worked without /v1, `mico chat` did not."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return streams("data: [DONE]\n\n")(request)

    for address in ("http://gateway", "http://gateway/", "http://gateway/v1", "http://gateway/v1/"):
        list(Client(address, None, transport=httpx.MockTransport(answer)).chat("m", []))
    assert set(asked) == {"http://gateway/v1/chat/completions"}


def test_an_answer_of_another_shape_is_told() -> None:
    """`mico sites list` and `mico doctor` ended with a KeyError before another version or another server."""
    answer = client(lambda _: httpx.Response(200, json={"sites": [{"name": "a"}]})).get("/admin/api/sites")
    for found, key in ((answer, "routes"), (answer["sites"][0], "slots")):
        with pytest.raises(CommandFailed, match="answer is not understood") as failure:
            found[key]
        assert f"it has no {key!r}: another version of Mico" in failure.value.cause


@pytest.mark.parametrize("data", [None, "m", {"id": "m"}, ["m"], [{"id": "m"}, 7]])
def test_a_list_of_what_are_no_objects_is_told(data: object) -> None:
    """`mico models` and `mico chat` blamed themselves for a list of models of another server."""
    answer = client(lambda _: httpx.Response(200, json={"data": data})).get("/v1/models")
    with pytest.raises(CommandFailed, match="answer is not understood") as failure:
        answer.objects("data")
    assert "its 'data' is no list of objects: another version of Mico" in failure.value.cause


@pytest.mark.parametrize("text", ["<html>", "", "[]", "null", "[" * 100_000])
def test_what_is_no_gateway_is_told(text: str) -> None:
    with pytest.raises(CommandFailed, match="no gateway of Mico"):
        client(lambda _: httpx.Response(200, text=text)).get("/v1/models")


def test_a_gateway_that_says_nothing_is_away() -> None:
    """A connection that is accepted and then hangs kept `mico top` deaf to keys for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}/v1"
        with pytest.raises(GatewayUnavailable, match="does not answer"):
            Client(url, None).get("/v1/models", timeout_s=0.05)


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HTTP_PROXY set and NO_PROXY not, `mico up` never reached its own gateway."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        with pytest.raises(GatewayUnavailable):
            Client(url, None).get("/v1/models", timeout_s=0.05)
        server.settimeout(5.0)
        server.accept()[0].close()


def test_text_that_is_none_is_refused_and_not_sent() -> None:
    with pytest.raises(CommandFailed, match="can't be sent"):
        client(streams()).post("/v1/x", {"model": "\udcff"})
    with pytest.raises(CommandFailed, match="can't be sent"):
        list(client(streams()).chat("\udcff", []))


@pytest.mark.parametrize(
    ("answer", "rate"),
    [
        (Answer("", "a", 0, None, 2.0), "- tok/s"),
        (Answer("x", "a", 1, 1.0, 1.5), "- tok/s"),
        (Answer("xy", "a", 2, 2.0, 2.0), "- tok/s"),
        (Answer("x" * 11, "a", 11, 1.0, 2.0), "10 tok/s"),
    ],
)
def test_a_speed_is_told_only_where_there_is_one(answer: Answer, rate: str) -> None:
    """An answer without a token had a speed below zero."""
    assert f", {rate}, " in answer.stats()


def test_a_special_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`-o /dev/null`, asked by root, made a plain file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        client(lambda _: httpx.Response(200, content=b"answers")).download("/v1/files/f/content", pipe)
        assert os.read(reading, 100) == b"answers"
        assert pipe.is_fifo()
        assert list(tmp_path.iterdir()) == [pipe]
    finally:
        os.close(reading)


def test_a_file_that_is_not_complete_leaves_no_part(tmp_path: Path) -> None:
    """The part kept a full disk full, and nothing said which file it was."""

    def broken() -> Iterator[bytes]:
        yield b"answers"
        raise httpx.ReadError("the connection ended")

    def full(_: httpx.Request) -> httpx.Response:
        (tmp_path / "a.jsonl.part").unlink(missing_ok=True)
        (tmp_path / "a.jsonl.part").symlink_to("/dev/full")
        return httpx.Response(200, content=b"answers")

    with pytest.raises(GatewayUnavailable):
        client(lambda _: httpx.Response(200, content=broken())).download("/v1/x", tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CommandFailed, match=r"a\.jsonl was not written") as failure:
        client(full).download("/v1/x", tmp_path / "a.jsonl")
    assert failure.value.cause == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_gateway_on_this_machine_is_asked_without_loading_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs 80 ms of a core, and a start asks several times a second."""
    loaded: list[str] = []
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda *_, **__: loaded.append("certificates")
    )
    Client("http://127.0.0.1:8080/v1", "key")
    assert loaded == []
    Client("https://gateway.example/v1", "key")
    assert loaded == ["certificates"]
