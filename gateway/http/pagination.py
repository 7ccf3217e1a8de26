"""Reads the page of a list that a client requests and renders it, in OpenAI's or Anthropic's format."""

from __future__ import annotations

from typing import Any, Final

from litestar import Response

from gateway.batches.files import Page
from gateway.errors import BadRequest
from gateway.http.body import json_response
from gateway.http.exchange import AnyRequest

CURSOR_MAX_PAGE: Final = 1_000
CURSOR_DEFAULT_PAGE: Final = 20


def read_page(request: AnyRequest, default_limit: int, max_limit: int) -> Page:
    """Read `limit`, `order` and `after`. Raises BadRequest."""
    limit = request.query_params.get("limit", str(default_limit))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= max_limit):
        raise BadRequest(f"'limit' is from 1 to {max_limit}.", param="limit", code="invalid_value")
    order = request.query_params.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise BadRequest("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    return Page(int(limit), order == "desc", request.query_params.get("after"))


def read_cursor_page(request: AnyRequest) -> Page:
    """Read Anthropic's `limit`, `after_id` and `before_id`. Raises BadRequest.

    A page before `before_id` is read oldest first, beginning next to `before_id`.
    """
    after, before = request.query_params.get("after_id"), request.query_params.get("before_id")
    if after and before:
        raise BadRequest("Send 'after_id' or 'before_id', not both.")
    limit = read_page(request, CURSOR_DEFAULT_PAGE, CURSOR_MAX_PAGE).limit
    return Page(limit, not before, after or before)


def cursor_page(rows: list[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Render a page in Anthropic's format. `rows`, in the order of reading, have one extra if more follow."""
    data = rows[: page.limit] if page.newest_first else rows[: page.limit][::-1]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first_id, "last_id": last_id, "has_more": len(rows) > page.limit}


def list_response(rows: list[dict[str, Any]], page: Page) -> Response[bytes]:
    """Render a page in OpenAI's format. `rows` have one extra if more follow."""
    data = rows[: page.limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return json_response({"object": "list", "data": data, **ends, "has_more": len(rows) > page.limit})
