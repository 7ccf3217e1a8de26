"""Requests to POST /v1/messages, and its errors."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.support.fakes.edge import MODEL

ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]} | fields


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the error, in Anthropic's shape, with the id of the request."""
    assert response.status_code == status, response.text
    whole = response.json()
    assert whole.keys() == {"type", "error", "request_id"}
    assert whole["request_id"] == response.headers["x-request-id"]
    error: dict[str, Any] = whole["error"]
    return error
