"""Reads which page of a list a client asks for and renders it, for files, batches and operators' lists."""

from __future__ import annotations

from typing import Any

from litestar import Response

from gateway.batches.files import Page
from gateway.errors import BadRequest
from gateway.http.body import json_response
from gateway.http.exchange import AnyRequest


def read_page(request: AnyRequest, default_limit: int, max_limit: int) -> Page:
    """Read `limit`, `order` and `after`. Raises BadRequest."""
    limit = request.query_params.get("limit", str(default_limit))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= max_limit):
        raise BadRequest(f"'limit' is from 1 to {max_limit}.", param="limit", code="invalid_value")
    order = request.query_params.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise BadRequest("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    return Page(int(limit), order == "desc", request.query_params.get("after"))


def list_response(rows: list[dict[str, Any]], page: Page) -> Response[bytes]:
    """Render one page. `rows` has one more than the page if there are more."""
    data = rows[: page.limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return json_response({"object": "list", "data": data, **ends, "has_more": len(rows) > page.limit})
