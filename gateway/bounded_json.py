"""Decodes JSON objects from clients in bounded time."""

from __future__ import annotations

import msgspec

from gateway.errors import BadRequest
from wire.json_structure import MAX_STRUCTURE, exceeds

DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""The errors of msgspec, which does not wrap the ValueError for bytes that are not UTF-8."""


def decode(raw: bytes) -> dict[str, object]:
    """Decode one JSON object. Raises BadRequest for invalid JSON, another type, or too many elements."""
    if len(raw) > MAX_STRUCTURE and exceeds(raw, MAX_STRUCTURE):
        raise BadRequest(
            f"The body holds more than {MAX_STRUCTURE} objects, lists and fields.", code="invalid_value"
        )
    try:
        body = msgspec.json.decode(raw)
    except DECODE_ERRORS as exc:
        raise BadRequest(f"The body is not valid JSON: {str(exc)[:200]}.", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return body
