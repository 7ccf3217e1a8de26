"""Endpoints of OpenAI's and vLLM's that the gateway does not serve are refused by name."""

from __future__ import annotations

import pytest

from tests.support.fakes.edge import error_of, get, post


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/score", "scoring"),
        ("/v1/images/generations", "generation of images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/moderations", "moderation"),
        ("/v1/assistants", "assistants"),
        ("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
        ("/v1/responses/resp_1/cancel", "stored responses"),
        ("/v1/conversations", "conversations"),
        ("/v1/conversations/conv_1/items", "conversations"),
        ("/v1/uploads", "uploads in parts"),
        ("/v1/uploads/upload_1/parts", "uploads in parts"),
        ("/v1/images/generations/x", "generation of images"),
        ("/v1//images/generations/", "generation of images"),
        ("/v1/videos", "videos"),
        ("/v1/vector_stores/vs_1/files/file_1", "vector stores"),
        ("/v1/realtime/client_secrets", "real time"),
        ("/v1/threads/thread_1/runs", "assistants"),
        ("/v1/chat/completions/chatcmpl-1", "stored chats"),
        ("/v1/containers/cntr_1/files", "containers"),
        ("/v1/evals", "evaluations"),
        ("/v1/fine_tuning/alpha/graders/run", "graders"),
        ("/v1/organization/usage/completions", "/admin/api"),
    ],
)
def test_unsupported_openai_endpoints_are_named(path: str, what: str) -> None:
    for response in (post(path, {"model": "demo", "input": "x"})[0], get(path), get(path, "PATCH")):
        error = error_of(response, 404)
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "not_found", None)
        assert what in error["message"]
        assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/imagesque", "/v1/score/x", "/v1/responses/resp_1/x", "/v1/chat/completions/id/x/y"]
)
def test_paths_that_openai_lacks_too_are_unknown(path: str) -> None:
    assert error_of(get(path), 404)["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokenize_endpoints_are_refused_with_a_reason(path: str) -> None:
    error = error_of(post(path, {"model": "demo", "prompt": "x"})[0], 404)
    assert "tokenizers live at the sites" in error["message"]
