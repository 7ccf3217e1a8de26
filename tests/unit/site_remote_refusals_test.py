"""The meaning of a server's refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from site_engine.errors import Reason
from site_engine.remote.server import MAX_RETRY_AFTER_S, refused_in_stream, server_refused

NO_ROOM = "exceeds the maximum allowed length"
"""Of SGLang whose memory holds less than its context: of another site the same context may do."""

FORBIDDEN = "Extra inputs are not permitted"
"""Of Mistral, of a field of OpenAI's that it does not have."""
TOP_P = "Input validation error: `top_p` must be > 0.0 and < 1.0"
"""Of TGI, which other sites may take."""


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, Reason.CONTEXT_LENGTH),
        (400, {"message": "This model's maximum context length is 4096 tokens."}, Reason.CONTEXT_LENGTH),
        (400, {"error": {"type": "exceed_context_size_error", "message": "no"}}, Reason.CONTEXT_LENGTH),
        (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096"}, Reason.CONTEXT_LENGTH),
        (422, {"error": "`inputs` must have less than 4096 tokens. Given: 5000"}, Reason.CONTEXT_LENGTH),
        (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, Reason.CONTEXT_LENGTH),
        (400, {"error": {"message": "Input is too long for requested model."}}, Reason.CONTEXT_LENGTH),
        (
            400,
            {
                "error": {
                    "message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."
                }
            },
            Reason.CONTEXT_LENGTH,
        ),
        *(
            (400, {"error": {"message": message}}, Reason.CONTEXT_LENGTH)
            for message in (
                "max_completion_tokens is too large: 9.This model supports at most 8 completion tokens.",
                "The decoder prompt (length 9) is longer than the maximum model length of 8.",
                "input length and `max_tokens` exceed context limit: 5 + 4 > 8",
                "This model's maximum prompt length is 8 but the request contains 9 tokens.",
                "Invalid request: Your request exceeded model token limit: 8",
            )
        ),
        (400, {"message": f"Input length (9 tokens) {NO_ROOM} (8 tokens)."}, Reason.UNSUPPORTED),
        *(
            (400, {"error": {"message": message}}, Reason.UNSUPPORTED)
            for message in (
                "Unsupported parameter: 'top_p' is not supported with this model.",
                "Argument not supported on this model: presencePenalty",
                "property 'logit_bias' is unsupported",
                "Unsupported value: 'temperature' does not support 0.7 with this model.",
            )
        ),
        (422, {"detail": [{"loc": ["body", "seed"], "msg": FORBIDDEN}]}, Reason.UNSUPPORTED),
        (400, [{"error": {"message": 'Unknown name "seed": Cannot find field.'}}], Reason.UNSUPPORTED),
        (400, {"message": "This model supports at most 8 completion tokens, not 9."}, Reason.INVALID),
        (422, {"detail": [{"loc": ["body", "top_p"]}]}, Reason.INVALID),
        (400, "plain words", Reason.INVALID),
        (401, {"error": {"message": "bad key"}}, Reason.INTERNAL),
        (404, {"detail": "Not Found"}, Reason.UNSUPPORTED),
        (429, {}, Reason.FULL),
        (503, "<html>", Reason.FULL),
        (529, {"error": {"type": "overloaded_error", "message": "Overloaded"}}, Reason.FULL),
        (500, None, Reason.INTERNAL),
        (302, "", Reason.INTERNAL),
    ],
)
def test_every_status_has_a_reason_that_a_gateway_can_act_on(status: int, body: Any, reason: Reason) -> None:
    found = server_refused(
        status, json.dumps(body).encode() if not isinstance(body, str) else body.encode(), {}
    )
    assert found.refusal.reason is reason
    assert found.refusal.message
    assert (found.retry_after_s is not None) is (reason is Reason.FULL)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", "code": 503}, Reason.FULL),
        ({"message": "Rate limit exceeded", "code": 429}, Reason.FULL),
        ({"message": "Model is overloaded", "http_status_code": 422}, Reason.FULL),
        ("Model is overloaded", Reason.FULL),
        (
            {"message": "The input is longer than the model's context length", "code": 400},
            Reason.CONTEXT_LENGTH,
        ),
        ({"message": f"Input length (9 tokens) {NO_ROOM} (8 tokens).", "code": 400}, Reason.UNSUPPORTED),
        ({"message": "Invalid grammar", "type": "BAD_REQUEST", "code": 400}, Reason.UNSUPPORTED),  # SGLang
        ({"message": "no grammar: overloaded", "type": "BAD_REQUEST", "code": 400}, Reason.UNSUPPORTED),
        ({"message": "The server is currently overloaded with other requests."}, Reason.FULL),
        ({"message": "Overloaded", "type": "overloaded_error"}, Reason.FULL),
        (TOP_P, Reason.UNSUPPORTED),
        ({"message": TOP_P, "http_status_code": 422}, Reason.UNSUPPORTED),
        ({"message": "Request failed during generation", "http_status_code": 422}, None),
        ({"message": "EngineCore encountered an issue", "type": "BadRequestError", "code": 400}, None),
        ({"message": "503 pages are lost", "code": None}, None),
        ("the device is lost", None),
    ],
)
def test_an_error_in_a_stream_is_a_refusal_where_it_is_known_for_one(
    error: Any, reason: Reason | None
) -> None:
    found = refused_in_stream(json.dumps(error).encode())
    assert (found and found.refusal.reason) is reason
    assert found is None or (found.retry_after_s is not None) is (reason is Reason.FULL)


@pytest.mark.parametrize(
    ("asked", "kept"), [("7", 7.0), ("9999", MAX_RETRY_AFTER_S), ("soon", 1.0), ("-1", 0.0)]
)
def test_a_server_is_left_alone_as_long_as_it_asks_within_reason(asked: str, kept: float) -> None:
    assert server_refused(429, b"", {"retry-after": asked}).retry_after_s == kept


def test_the_field_that_the_server_names_is_passed_on() -> None:
    body = {"error": {"message": "must be at most 1", "param": "top_p"}}
    found = server_refused(400, json.dumps(body).encode(), {})
    assert (found.refusal.message, found.refusal.param) == ("must be at most 1", "top_p")


def test_an_error_in_a_list_is_read_as_gemini_writes_it() -> None:
    body = [{"error": {"code": 400, "message": "no such field"}}]
    found = server_refused(400, json.dumps(body).encode(), {})
    assert found.refusal.message == "no such field"


def test_half_a_character_in_what_the_server_says_can_be_passed_on() -> None:
    body = {"error": {"message": "cut: \ud83c", "param": "\ud83c"}}
    found = server_refused(400, json.dumps(body).encode(), {})
    assert (found.refusal.message, found.refusal.param) == ("cut: ?", "?")
