"""The API's promises about HTTP itself, independent of the endpoint."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import pytest
from litestar import get as route_get
from litestar import post as route_post
from litestar.exceptions import ClientException
from litestar.params import FromPath, FromQuery

from gateway.domain import Delta
from gateway.errors import DeadlinePassed, MicoError, Overloaded
from gateway.http.backend import Readiness
from gateway.side_work import INLINE_BYTES
from tests.support.fakes.edge import (
    MODEL,
    OPENING,
    Edge,
    chat,
    chat_body,
    error_of,
    fail,
    get,
    post,
    refused,
    run,
)

CHAT = "/v1/chat/completions"
JSON_ROUTES = [CHAT, "/v1/completions"]


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"]
)
def test_another_content_type_is_refused(path: str, content_type: str) -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.post(path, chat_body(), content_type=content_type)
        assert "application/json" in error_of(response, 400)["message"]

    assert not run(scenario).queries


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_compressed_body_is_refused_by_that_name(path: str) -> None:
    async def scenario(edge: Edge) -> None:
        body = gzip.compress(json.dumps(chat_body()).encode())
        error = error_of(await edge.post(path, body, content_encoding="gzip"), 400)
        assert error["code"] == "invalid_content_encoding" and "'gzip'" in error["message"]
        plain = await edge.post(CHAT, chat_body(), content_encoding="identity")
        assert plain.status_code == 200

    run(scenario)


def test_json_may_name_its_charset() -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.post(CHAT, chat_body(), content_type="Application/JSON; charset=utf-8")
        assert response.status_code == 200

    run(scenario)


BROKEN = [b"", b"{", b"{'a': 1}", b"\xff", b"NaN", b"[" * 100_000, b'{"model":' * 5000, b'{"a":"\\ud800"}']


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_body_that_is_not_json_is_refused(path: str, body: bytes) -> None:
    response, script = post(path, body)
    assert error_of(response, 400)["code"] == "invalid_json"
    assert not script.queries


@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
def test_a_body_that_nests_too_deeply_is_refused_wherever_that_shows(padding: int) -> None:
    """Parameters of a function are encoded again, with more of the stack in use than when decoded."""

    def body(depth: int) -> bytes:
        tool = b'{"type":"function","function":{"name":"f","parameters":%b1%b}}' % (
            b'{"a":' * depth,
            b"}" * depth,
        )
        return b'%b,"tools":[%b],"ignored":"%b"}' % (
            json.dumps(chat_body()).encode()[:-1],
            tool,
            b"x" * padding,
        )

    async def scenario(edge: Edge) -> None:
        statuses = [(await edge.post(CHAT, body(depth))).status_code for depth in range(800, 1000)]
        assert set(statuses) == {200, 400}

    run(scenario)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_json_that_is_not_an_object_is_refused(body: bytes) -> None:
    error_of(post(CHAT, body)[0], 400)


def test_unknown_fields_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gateway"):
        response, script = chat(surprise={"deep": [1]}, another=5)
    assert response.status_code == 200
    assert len(script.queries) == 1
    assert any("surprise" in record.getMessage() for record in caplog.records)


OPTIONAL = [
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "response_format",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "web_search_options",
    "ignore_eos",
    "min_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "priority",
]


def test_null_means_omitted() -> None:
    response, script = chat(**dict.fromkeys(OPTIONAL))
    assert response.status_code == 200
    assert script.query.sampling == chat()[1].query.sampling


def test_integral_floats_are_integers() -> None:
    _, script = chat(n=2.0, max_tokens=5.0, seed=7.0, top_k=1e1)
    sampling = script.query.sampling
    read = (sampling.n, sampling.max_tokens, sampling.seed, sampling.top_k)
    assert read == (2, 5, 7, 10)
    assert {type(value) for value in read} == {int}


@pytest.mark.parametrize("field", ["n", "max_tokens", "seed", "top_logprobs", "temperature", "top_p"])
@pytest.mark.parametrize("value", [True, "1", [1], {}])
def test_nothing_else_passes_for_a_number(field: str, value: Any) -> None:
    assert refused(field, logprobs=True, **{field: value})["code"] == "invalid_type"


def test_fractions_are_not_integers() -> None:
    refused("n", n=1.5)


def test_unknown_paths_and_wrong_methods_have_the_error_shape() -> None:
    assert error_of(get("/v1/nothing"), 404)["type"] == "invalid_request_error"
    for path, allowed in ((CHAT, "POST, OPTIONS"), ("/v1/models", "GET, OPTIONS, HEAD")):
        wrong = get(path, "DELETE")
        error_of(wrong, 405)
        assert set(wrong.headers["allow"].split(", ")) == set(allowed.split(", "))
    for path in ("/v1/models", "/health"):
        assert set(get(path, "OPTIONS").headers["allow"].split(", ")) == {"GET", "OPTIONS", "HEAD"}


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_a_413(announced: bool) -> None:
    body = b" " * 2000

    async def chunks() -> Any:
        for _ in range(4):
            yield body[:500]

    async def scenario(edge: Edge) -> None:
        headers = {"content-type": "application/json"}
        content = body if announced else chunks()
        error_of(await edge.http.post(CHAT, content=content, headers=headers), 413)

    assert not run(scenario, body_limit_bytes=1999).queries


def test_an_unexpected_failure_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    response, _ = chat(fail(RuntimeError("secret at /srv/gateway/app.py, <object at 0x7f00>")))
    error = error_of(response, 500)
    assert error["type"] == "server_error"
    assert not any(
        word in error["message"] for word in ("secret", "/srv", "0x7f", "Traceback", "RuntimeError")
    )
    assert response.headers["x-request-id"] in error["message"]
    assert any(
        record.exc_info and response.headers["x-request-id"] in record.getMessage()
        for record in caplog.records
    )


def test_an_unexpected_failure_in_a_stream_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    response, _ = chat(fail(RuntimeError("secret"), after=[OPENING, Delta(0, "x", 1)]), stream=True)
    assert response.status_code == 200
    assert "secret" not in response.text
    assert '"type":"server_error"' in response.text
    assert any(record.exc_info for record in caplog.records)


def test_every_endpoint_has_the_error_shape() -> None:
    @route_get("/later/{number:int}", sync_to_thread=False)
    def later(number: FromPath[int], wanted: FromQuery[int]) -> None:
        raise ClientException("Not like this.")

    @route_post("/form", sync_to_thread=False)
    def broken() -> None:
        raise KeyError("/srv/secret")

    async def scenario(edge: Edge) -> None:
        error = error_of(await edge.http.get("/later/5?wanted=x"), 400)
        assert error["param"] == "wanted"
        assert error_of(await edge.http.get("/later/5?wanted=1"), 400)["message"] == "Not like this."
        error_of(await edge.http.get("/later/x"), 404)
        assert "secret" not in error_of(await edge.http.post("/form"), 500)["message"]

    run(scenario, handlers=[later, broken])


def test_at_most_ten_problems_are_listed() -> None:
    messages = [{"role": "nobody", "content": "x"} for _ in range(12)]
    error = refused("messages.0.role", messages=messages, n=0)
    assert error["message"].count("must be one of") == 10
    assert error["message"].endswith("There are more problems.")


def test_invalid_input_is_echoed_in_at_most_200_characters() -> None:
    error = refused("temperature", temperature="x" * 5000)
    assert 150 < error["message"].count("x") <= 200
    assert len(refused("n", n=10**3000)["message"]) < 400


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic bWljbw==", "mico-secret", "Bearer \xe9"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models")]
)
def test_a_missing_or_wrong_key_is_a_401(method: str, path: str, authorization: str | None) -> None:
    async def scenario(edge: Edge) -> None:
        del edge.http.headers["authorization"]
        headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
        response = await edge.http.request(method, path, headers=headers)
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "wrong" not in error["message"]

    assert not run(scenario).queries


def test_the_bearer_scheme_is_case_insensitive_and_probes_need_no_key() -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.post(CHAT, chat_body(), authorization="bearer  mico-secret ")).status_code == 200

    run(scenario)
    for path in ("/health", "/ready", "/version", "/"):
        assert get(path).status_code == 200


@pytest.mark.parametrize("sent", ["my-id-17", "a b/c:d", "x" * 128])
def test_a_valid_request_id_is_echoed(sent: str) -> None:
    async def scenario(edge: Edge) -> None:
        for stream in (False, True):
            response = await edge.post(CHAT, chat_body(stream=stream), x_request_id=sent)
            assert response.headers["x-request-id"] == sent

    first, second = run(scenario).queries
    assert first.id != second.id


@pytest.mark.parametrize("sent", ["", "x" * 129, "t\tab", "caf\xe9"])
def test_an_invalid_request_id_is_replaced(sent: str) -> None:
    async def scenario(edge: Edge) -> None:
        headers = {"x-request-id": sent.encode("latin-1"), "content-type": "application/json"}
        response = await edge.http.post(CHAT, json=chat_body(), headers=headers)
        made = response.headers["x-request-id"]
        assert len(made) == 32
        assert int(made, 16)

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/nowhere"),
        ("PUT", CHAT),
        ("POST", CHAT),
        ("OPTIONS", CHAT),
        ("GET", "/v1/models"),
    ],
)
def test_every_response_has_a_request_id(method: str, path: str) -> None:
    response = get(path, method)
    assert len(response.headers["x-request-id"]) == 32
    assert int(response.headers["openai-processing-ms"]) >= 0


def test_the_sdk_exposes_the_request_id() -> None:
    async def scenario(edge: Edge) -> None:
        completion = await edge.sdk.chat.completions.create(**chat_body())
        assert completion._request_id is not None
        assert completion.id == f"chatcmpl-{completion._request_id}"

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_headers_name_the_site_the_attempts_and_the_times(stream: bool) -> None:
    times = iter([10.0, *[10.25] * 50])

    async def scenario(edge: Edge) -> None:
        response = await edge.post(CHAT, chat_body(stream=stream))
        assert response.headers["openai-processing-ms"] == "250"
        assert response.headers["x-mico-site"] == "alpha"
        assert response.headers["x-mico-attempts"] == "1"
        assert response.headers["x-mico-queue-ms"] == "12"

    run(scenario, clock=lambda: next(times))


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_stream_has_event_stream_headers(path: str) -> None:
    response, _ = post(path, chat_body(prompt="x", stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers


def test_health_is_200_and_empty() -> None:
    response = get("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert get("/health", "HEAD").status_code == 200


def test_ready_is_503_while_no_site_can_serve_and_tells_clients_no_details() -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.http.get("/ready")).json() == {"status": "ready"}
        edge.script.readiness = Readiness(False, "site alpha has gone")
        response = await edge.http.get("/ready")
        assert error_of(response, 503)["message"] == "no site can serve now"

    run(scenario)


def test_metrics_are_not_on_the_clients_port() -> None:
    assert error_of(get("/metrics"), 404)


def test_version_is_the_packages() -> None:
    assert get("/version").json() == {"version": "9.8.7"}


@pytest.mark.parametrize("base", ["http://edge/v1", "http://edge/v1/"])
def test_a_base_url_works_with_and_without_its_slash(base: str) -> None:
    async def scenario(edge: Edge) -> None:
        sdk = edge.sdk.with_options(base_url=base)
        assert (await sdk.chat.completions.create(**chat_body())).model == MODEL
        assert [model.id async for model in sdk.models.list()]
        for path in ("/v1/chat/completions/", "/v1//chat/completions"):
            assert (await edge.post(path, chat_body())).status_code == 200

    run(scenario)


def test_preflights_need_no_key() -> None:
    wanted = {"origin": "https://app.example", "access-control-request-method": "POST"}
    wanted["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    response = get(CHAT, "OPTIONS", **wanted)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "*"
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert get(CHAT, "OPTIONS").status_code == 204


def test_a_web_page_may_read_answers_and_errors() -> None:
    async def scenario(edge: Edge) -> None:
        for body in (chat_body(), chat_body(stream=True), chat_body(n=0)):
            response = await edge.post(CHAT, body, origin="https://app.example")
            assert response.headers["access-control-allow-origin"] == "*"
            assert "x-request-id" in response.headers["access-control-expose-headers"]

    run(scenario)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Overloaded("full", retry_after_s=2.0), {"retry-after", "retry-after-ms"}),
        (DeadlinePassed("late"), {"x-should-retry"}),
    ],
)
def test_a_web_page_may_read_whether_to_try_again(error: MicoError, told: set[str]) -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.post(CHAT, chat_body(), origin="https://app.example")
        assert told <= response.headers.keys()
        assert told <= set(response.headers["access-control-expose-headers"].split(", "))

    run(scenario, fail(error))


def test_a_stranger_host_is_refused_in_shape() -> None:
    async def scenario(edge: Edge) -> None:
        error_of(await edge.http.get("/health", headers={"host": "a b"}), 400)

    run(scenario)
